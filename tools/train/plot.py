"""The loss curves of a run and of its single-process reference, on one axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN, REFERENCE, HELD_OUT, INK = "#1f4e9c", "#f0a84b", "#b0303a", "#404040"


@dataclass(frozen=True, slots=True)
class Difference:
    """The step at which two curves are furthest apart, and by how much relative to the second."""

    step: int
    relative: float


def largest_difference(
    losses: Mapping[int, float], reference: Mapping[int, float]
) -> Difference | None:
    """Return where ``losses`` (by step) differ most from ``reference``; None without common steps.

    A loss that is not finite differs infinitely.
    """
    common = [
        Difference(step, _relative(losses[step], reference[step]))
        for step in losses
        if step in reference
    ]
    return max(common, key=lambda difference: difference.relative, default=None)


def _relative(value: float, reference: float) -> float:
    relative = abs(value - reference) / abs(reference) if reference else float("inf")
    return relative if relative == relative else float("inf")


def plot_losses(
    losses: Mapping[int, float],
    reference: Mapping[int, float],
    title: str,
    folder: Path,
    unit: str = "byte",
    held_out: Mapping[int, float] | None = None,
) -> None:
    """Write ``loss.png`` and ``loss.svg`` to ``folder``; losses are nats per ``unit`` by step.

    Needs matplotlib, which takes a second to load, and raises what it raises.
    """
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed

    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    difference = largest_difference(losses, reference)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if reference:
        # Wide and below: where the curves agree the run lies inside its reference.
        axes.plot(
            list(reference),
            list(reference.values()),
            color=REFERENCE,
            linewidth=6,
            solid_capstyle="round",
            label="one process, no parallelism",
        )
    axes.plot(list(losses), list(losses.values()), color=RUN, linewidth=1.6, label="this run")
    if held_out:
        axes.plot(
            list(held_out),
            list(held_out.values()),
            color=HELD_OUT,
            linewidth=1.2,
            marker="o",
            markersize=4,
            label="held-out text",
        )
    axes.set_title(f"Training loss, {title}", fontsize=11, color=INK, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per {unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    if difference is not None:
        axes.text(
            0.02,
            0.05,
            f"largest difference: {difference.relative:.1e} relative, at step {difference.step}",
            transform=axes.transAxes,
            color=INK,
        )
    figure.savefig(folder / "loss.png", dpi=150)
    figure.savefig(folder / "loss.svg")
    pyplot.close(figure)
