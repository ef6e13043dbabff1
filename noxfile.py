# /// script
# dependencies = ["nox[uv]>=2025.10.14"]
# ///
"""All checks and jobs of the repository; plain ``nox`` runs what a change must pass.

One package at a time: ``nox -s "tests(hp-mesh)"``. The block above lets nox fetch uv for itself;
``nox --script-mode none`` goes without it, with virtualenv.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["checks"]

# uv does not read pip's settings: hand it the local wheels that pip was told about.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))

# Every test starts processes that import torch: let the first of them keep the compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: nox.project.load_toml(path)["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PACKAGES = sorted(PROJECTS, key=lambda name: len(PROJECTS[name]["dependencies"]))
TEST_TOOLS = ("-etools/rank_pool", "pytest", "pytest-timeout", "hypothesis", "numpy")
DOCSTRINGS = "griffelib>=2"  # tools/docstrings.py
TRAINER = ("-r", "tools/train/requirements.txt")
DIST = ROOT / "dist"

each_package = nox.parametrize("package", PACKAGES, ids=PACKAGES)


def siblings(package: str) -> list[str]:
    """Return the packages of this repository that ``package`` declares, far ones included."""
    declared = [re.match(r"[\w-]+", line) for line in PROJECTS[package]["dependencies"]]
    near = [found[0] for found in declared if found and found[0] in PROJECTS]
    return list(dict.fromkeys(near + [far for name in near for far in siblings(name)]))


def install(session: nox.Session, *packages: str, extras: tuple[str, ...] = ()) -> None:
    """Install packages and their siblings from this tree, editable, and ``extras``."""
    names = dict.fromkeys(name for p in packages for name in (p, *siblings(p)))
    session.install("-c", "constraints.txt", *(f"-epackages/{n}" for n in names), *extras)
    share_compiled(session)


def share_compiled(session: nox.Session) -> None:
    """Link the modules that another session's environment has compiled, if it has the same torch.

    uv links sources to its cache and compiles nothing, so each environment would compile all that
    importing torch reads. Python looks at the time and size of a source before it takes one.
    """
    known = sorted(session.env_dir.parent.glob("*/lib/python*/site-packages/torch/__pycache__"))
    folders = {cache.parent.parent for cache in known}
    for own in session.env_dir.glob("lib/python*/site-packages"):
        for other in folders - {own} if _torch_in(own) else ():
            if _torch_in(own) == _torch_in(other):
                _link_compiled(other, own)
                return


def _torch_in(packages: Path) -> tuple[int, int] | None:
    path = packages / "torch" / "__init__.py"
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


def _link_compiled(source: Path, target: Path) -> None:
    for folder, _, files in os.walk(source):
        here = target / Path(folder).relative_to(source)
        if here.name == "__pycache__" and here.parent.exists() and not here.exists():
            here.mkdir()
            for file in files:
                if file.endswith(".pyc") and "-pytest-" not in file:  # whole, and not pytest's own
                    os.link(Path(folder, file), here / file)


def test_requirements(*packages: str) -> tuple[str, ...]:
    """Return what packages' tests need beyond the tools of all tests."""
    paths = [Path("packages", package, "tests", "requirements.txt") for package in packages]
    return tuple(word for path in paths if (ROOT / path).exists() for word in ("-r", str(path)))


def chosen_packages(session: nox.Session) -> tuple[list[str], list[str]]:
    """Return the packages named after ``--``, all if none is, and what else stands there."""
    named = [word for word in session.posargs if word in PACKAGES]
    return named or PACKAGES, [word for word in session.posargs if word not in PACKAGES]


def import_name(package: str) -> str:
    """Return the name under which ``package`` is imported."""
    return package.replace("-", "_")


@nox.session(venv_backend="none")
def checks(session: nox.Session) -> None:
    """Run all that a change must pass, the sessions side by side."""
    if session.posargs:
        session.error(f"{' '.join(session.posargs)} is for one session: name it with -s")
    # About the longest first; sessions of one job share what the first of them makes.
    tests_of = (f"tests({package})" for package in reversed(PACKAGES))
    jobs = ["lint", "integration", *tests_of, "types", "vendor", "docs", "build wheel"]
    session.run(sys.executable, "tools/checks.py", *jobs, external=True)


@nox.session
@each_package
def tests(session: nox.Session, package: str) -> None:
    """Run one package's tests: properties, simulated worlds, gloo ranks.

    ``--repeat N`` after ``--`` runs them N times: so, with glibc's checks of the heap, hunt for
    memory that is used after it was freed. ``LD_PRELOAD=libc_malloc_debug.so.0 MALLOC_CHECK_=3
    MALLOC_PERTURB_=165 nox -s "tests(hp-fsdp)" -- -k "faults or recovery or exceptions" --repeat
    500`` takes hours.
    """
    install(session, package, extras=(*TEST_TOOLS, *test_requirements(package)))
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
def quick(session: nox.Session) -> None:
    """Lint, type-check and test packages in short, after each change of a line: ``-- hp-cp``.

    Of each test that starts ranks one case is run, and none that takes seconds by itself. The rest
    is the other sessions' to find. Files of tests go to two processes.
    """
    chosen, options = chosen_packages(session)
    tools = (*TEST_TOOLS, "pytest-xdist", "mypy", "ruff")
    install(session, *chosen, extras=(*tools, *test_requirements(*chosen)))
    fast = ("--fast", "--numprocesses=2", "--dist=loadfile")
    for package in chosen:
        session.run("ruff", "check", f"packages/{package}")
        session.run("ruff", "format", "--check", f"packages/{package}")
        session.run("mypy", "-p", import_name(package))
        session.run("mypy", f"packages/{package}/tests")
        session.run("pytest", f"packages/{package}/tests", *fast, *options)


@nox.session
def oldest(session: nox.Session) -> None:
    """Test packages in short with the oldest torch that they allow: ``-- hp-cp``, or all.

    It is a build for CUDA, of some gigabytes. Tests of what it lacks are marked with
    `rank_pool.fails_with_torch_2_11` and must fail. The guides name the limits that users meet.
    """
    chosen, options = chosen_packages(session)
    names = dict.fromkeys(name for p in chosen for name in (p, *siblings(p)))
    tools = (*TEST_TOOLS, *test_requirements(*chosen))
    session.install("torch==2.11.0", *(f"-epackages/{name}" for name in names), *tools)
    for package in chosen:
        command = ("pytest", f"packages/{package}/tests", "--fast", *options)
        session.run(*command)


@nox.session
def types(session: nox.Session) -> None:
    """Check packages, their tests and the tools with mypy --strict; some of them after ``--``.

    One environment and one cache serve all: most of the work of each check is reading torch.
    """
    chosen = session.posargs or [*PACKAGES, "tools"]
    if unknown := set(chosen) - {*PACKAGES, "tools"}:
        session.error(f"no package: {', '.join(sorted(unknown))}; use {', '.join(PACKAGES)}, tools")
    needed = (*test_requirements(*PACKAGES), DOCSTRINGS, "types-Markdown", "mypy", "nox")
    install(session, *PACKAGES, extras=(*TEST_TOOLS, *TRAINER, *needed))
    if named := [package for package in chosen if package != "tools"]:
        session.run("mypy", *(word for name in named for word in ("-p", import_name(name))))
    for package in chosen:
        if package != "tools":
            session.run("mypy", f"packages/{package}/tests")
            continue
        files = (*ROOT.glob("tools/*.py"), *ROOT.glob("tools/docs/*.py"))
        session.run("mypy", "noxfile.py", *map(str, files))
        session.run("mypy", "-p", "rank_pool")
        session.run("mypy", "tools/train")
        session.run("mypy", "tests-integration", env={"MYPYPATH": "tools"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, docstrings of public names, and who may import whom."""
    session.install("ruff", "import-linter", DOCSTRINGS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/docstrings.py", *map(str, ROOT.glob("packages/*/src")))
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
def changelog(session: nox.Session) -> None:
    """Show the next release's section of each package's changelog; ``-- hp-mesh`` shows one.

    ``-- hp-mesh --version 0.3.0`` writes the section to CHANGELOG.md and deletes the fragments.
    """
    session.install("towncrier")
    chosen, options = chosen_packages(session)
    if options and len(chosen) > 1:
        session.error("packages have separate versions: name one package")
    for package in chosen:
        where = ("--config", "pyproject.toml", "--dir", f"packages/{package}")
        session.run("towncrier", "build", *where, *(options or ("--draft", "--version", "next")))


@nox.session
def build(session: nox.Session) -> None:
    """Build every package's sdist and wheel with hatch into dist/."""
    session.install("hatch")
    shutil.rmtree(DIST, ignore_errors=True)
    # hatch makes environments of its own: beside this one, and not inside the one nox names to uv.
    env = {"HATCH_DATA_DIR": str(Path(session.create_tmp()).resolve()), "UV_PYTHON": None}
    for package in PACKAGES:
        with session.chdir(ROOT / "packages" / package):
            session.run("hatch", "version", env=env)
            session.run("hatch", "build", str(DIST), env=env)


@nox.session(requires=["build"], reuse_venv=False)
@each_package
def wheel(session: nox.Session, package: str) -> None:
    """Install one wheel with what it declares and nothing else; run its README's examples."""
    (built,) = DIST.glob(f"{import_name(package)}-*.whl")
    (sdist,) = DIST.glob(f"{import_name(package)}-*.tar.gz")
    # uv keeps what it unpacked by name and version, which a new build shares with an old one.
    anew = [f"--refresh-package={each}" for each in PACKAGES if session.venv_backend == "uv"]
    session.install("-c", "constraints.txt", *anew, "--find-links", str(DIST), str(built))
    share_compiled(session)
    check = ("tools/check_wheel.py", import_name(package), str(sdist))
    session.run("python", "-P", *check)
    session.run("python", "-P", "tools/examples.py", f"packages/{package}/README.md")


@nox.session
def vendor(session: nox.Session) -> None:
    """Copy each package into a foreign one of its own; run a hundredth of its tests, or as told.

    What differs there are imports, and all test files are imported; packages and pytest's options
    go after ``--``: ``-- hp-cp --every 1`` runs all of one. The copies share one environment, where
    none of ours is installed.
    """
    chosen, options = chosen_packages(session)
    session.install("-c", "constraints.txt", "torch", *TEST_TOOLS, *test_requirements(*chosen))
    share_compiled(session)
    nothing_installed = (
        "import sys, importlib.util as u; found = [n for n in sys.argv[1:] if u.find_spec(n)]; "
        "assert not found, f'installed beside the vendored copy: {found}'"
    )
    session.run("python", "-P", "-c", nothing_installed, *map(import_name, PACKAGES))
    for package in chosen:
        root = Path(session.create_tmp()).resolve() / package
        shutil.rmtree(root, ignore_errors=True)
        target, tests = root / "host" / "_vendor", root / "host_tests"
        where = ["--into", str(target), "--namespace", "host._vendor", "--tests", str(tests)]
        session.run("python", "tools/vendor.py", package, *where)
        pages = Path("tools", "docs", "pages", package)  # some tests read them
        shutil.copytree(ROOT / pages, root / pages)
        settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(root), str(tests)]
        paths = {"PYTHONPATH": str(root)}
        # Without pytest's messages of failed asserts: rewriting all files takes long.
        words = ("--assert", "plain", *settings, *(options or ["--every", "100"]))
        session.run("pytest", *words, env=paths)


@nox.session
def integration(session: nox.Session) -> None:
    """Run packages together on several processes, the trainer among them."""
    install(session, *PACKAGES, extras=(*TEST_TOOLS, *TRAINER, "transformers", "peft", DOCSTRINGS))
    session.run("pytest", "tools/train/tests", "tests-integration", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/ and run its code blocks; ``-- serve`` shows it locally.

    The build is strict. Broken links, pages that the navigation lacks, and public names without a
    docstring or without a place in a reference page fail it.
    """
    if unknown := set(session.posargs) - {"serve"}:
        session.error(f"{' '.join(sorted(unknown))}: use nothing or serve")
    needed = ("-r", "tools/docs/requirements.txt")
    install(
        session, *PACKAGES, extras=(*needed, *TEST_TOOLS, *TRAINER, "transformers", "accelerate")
    )
    mkdocs = ("--config-file", "tools/docs/mkdocs.yml")
    env = {"NO_MKDOCS_2_WARNING": "1"}  # the requirements exclude mkdocs 2
    if session.posargs:
        session.run("mkdocs", "serve", *mkdocs, env=env)
        return
    session.run("mkdocs", "build", "--quiet", *mkdocs, env=env)
    session.run("pytest", "tools/docs/tests", env=env)
    session.run("python", "-P", "tools/examples.py", "README.md", "tools/docs/pages")


@nox.session
def faults(session: nox.Session) -> None:
    """Disturb the trainer hundreds of times: kills, stops, damaged checkpoints, restarts, options.

    Prints a table and fails if a run hangs, leaves processes, trains on wrong numbers or loses
    work; some half an hour on two cores. ``-- --scale 0.1`` makes a tenth of the trials, ``--
    --only kill stop`` those of some kinds. Without network namespaces, which need root, the row of
    the link says that it did not run. A sample of it runs in `integration`.
    """
    install(session, *PACKAGES, extras=(*TEST_TOOLS, *TRAINER))
    session.run("python", "tools/faults.py", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """Run what takes too long for every change: before a release, and after large changes.

    Tests with the mark ``long``: the default training run whole (12 of its steps always run),
    combinations of axes of which others have the parts, hp-cp's matrix of modes, masks, layouts and
    heads on four ranks (on two, and every fourth case on four in float64, it always runs), ten
    times the pairs of layouts that are planned by torch's planners too, five times those that
    torch's tests sweep over, models of Hugging Face on four processes, and what the planner reads
    of every family of models.
    Of hp-fsdp: what torch's library does with the tests of both; an exception at every third call
    of steps in each mode (at every 19th); parameters that no rank used on other meshes in each mode
    (on one or two); steps on simulated streams on meshes of one axis in each mode (on two axes);
    gradient accumulation on simulated streams in each mode, each way to accumulate and on each mesh
    (five cases);
    each schedule of a pipeline in each mode (1F1B and one that splits backward); blocks compiled in
    a wrapper (in place); of checkpoints, optimizers, and weights that are kept while they are
    written to, the other half of the combinations. Of hp-ep: inductor in float64, in bfloat16 and
    over ranks (in float32 on one).
    Then the tests on ranks of all packages with NCCL's rules (one case of those marked ``nccl``
    always runs), the GPU checks on CPUs, which show that they run, and all tests of all copies of
    packages, of which `vendor` runs a hundredth.
    """
    tools = (*TEST_TOOLS, *TRAINER, *test_requirements(*PACKAGES), DOCSTRINGS)
    install(session, *PACKAGES, extras=tools)
    nothing_marked = 5  # pytest's exit code
    for folder in (*(f"packages/{package}/tests" for package in PACKAGES), "tests-integration"):
        session.run("pytest", folder, "-m", "long", success_codes=[0, nothing_marked])
    for package in PACKAGES:
        session.run("pytest", f"packages/{package}/tests", "--like-nccl", "all")
    results = Path(session.create_tmp()) / "gpu_check"
    shutil.rmtree(results, ignore_errors=True)
    session.run("python", "tools/gpu_check.py", str(results), "--device", "cpu")
    session.notify("vendor", ["--every", "1"])


@nox.session
def train(session: nox.Session) -> None:
    """Train the reference model; degrees and other options go after ``--``."""
    install(session, *PACKAGES, extras=TRAINER)
    session.run("python", "tools/train", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, one at a time; packages or files, and ``--quick``, go after ``--``.

    ``-- tools`` runs the one of whole training steps. ``-- --commit`` also writes the figures that
    the documentation shows.
    """
    install(session, *PACKAGES, extras=TRAINER)
    for peers in sorted(ROOT.glob("packages/*/benchmarks/requirements.txt")):
        session.install("--no-deps", "-r", str(peers))
    session.run("python", "tools/bench.py", *session.posargs)
