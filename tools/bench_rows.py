"""Turn the JSON of each benchmark into rows of one shape, for the documentation.

A row is a comparison: a name, our figure, the peer's figure, their unit, and the ratio ours / peer
with its spread. Smaller ratios are better. Rows without a peer have only our figure.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    ``against``: the peer. ``low`` and ``high``: the spread of the ratio over rounds, which is
    quartiles, deciles or extremes as the benchmark says. Figures that do not exist are None.
    """

    name: str
    ours: float | None
    unit: str = ""
    against: str | None = None
    peer: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def _compared(
    name: str, ours: float, peer: float, unit: str, against: str, spread: Iterable[float] = ()
) -> Row:
    low, high = spread or (None, None)
    ratio = ours / peer if peer else None
    return Row(
        name=name,
        ours=ours,
        peer=peer,
        unit=unit,
        against=against,
        ratio=ratio,
        low=low,
        high=high,
    )


def _arms_of_fsdp(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        low, high = row["quartiles"]
        yield Row(
            name=f"{row['case']}: {row['arm']}",
            ours=row["ours_ms"],
            peer=row["theirs_ms"],
            unit="ms",
            against=row["against"],
            ratio=row["ratio"],
            low=low,
            high=high,
        )


def _against_arm(figure: str, unit: str, what: str = "") -> Callable[[Json], Iterator[Row]]:
    """Return a function that compares the arms of a case with the arm ``torch``."""

    def rows(result: Json) -> Iterator[Row]:
        theirs = {r["case"]: r[figure] for r in result["rows"] if r["arm"] == "torch"}
        for row in result["rows"]:
            if row["arm"] != "torch":
                name = f"{row['case']}: {row['arm']}{what}"
                yield _compared(name, row[figure], theirs[row["case"]], unit, "torch")

    return rows


def _gather(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        name = f"{row['case']} of {row['kilobytes_per_rank']} KiB per rank"
        yield _compared(name, row["direct_us"], row["packed_us"], "us", "packed")


def _padding(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        theirs = row["padding_percent"]["torch"]
        for layout, percent in row["padding_percent"].items():
            if layout != "torch":
                yield _compared(f"{row['case']}: {layout}", percent, theirs, "%", "torch")


def _attention(result: Json) -> Iterator[Row]:
    peers = {"limit": "one process / cores", "torch_ring": "torch's ring"}
    for row in result["rows"]:
        name = f"{row['case']}, {row['ranks']} ranks: {row['arm']}"
        for key, against in peers.items():
            if f"vs_{key}" in row and not row["arm"].startswith("torch"):
                low, high = row[f"vs_{key}_spread"]
                yield Row(
                    name=name,
                    ours=1e3 * row["seconds"],
                    unit="ms",
                    against=against,
                    ratio=row[f"vs_{key}"],
                    low=low,
                    high=high,
                )


def _documents(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        window = f", window {row['window']}" if row["window"] else ""
        name = f"{row['documents']}{window}, {row['ranks']} ranks: {row['layout']}"
        yield Row(name=name, ours=row["imbalance"], unit="most work / mean")


def _host_of_cp(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        if "ms" in row:
            yield Row(
                name=f"{row['arm']}, {row['part']}",
                ours=row["ms"],
                unit="ms",
                against="calls of torch alone" if "floor_ms" in row else None,
                peer=row.get("floor_ms"),
                ratio=row.get("over_floor"),
            )


def _times(figures: dict[str, str], unit: str) -> Callable[[Json], Iterator[Row]]:
    """Return a function that gives some figures of each case, without a peer."""

    def rows(result: Json) -> Iterator[Row]:
        for row in result["rows"]:
            for key, what in figures.items():
                if key in row:
                    name = f"{row['case']}, {row['ranks']} ranks, {what}"
                    yield Row(name=name, ours=row[key], unit=unit)

    return rows


def _bytes(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        if row["part"] == "plans":
            yield Row(name=row["case"], ours=row["plan_us"], unit="us")
            continue
        for key, against in (("greedy", "torch, greedy"), ("min_cost", "torch, min-cost")):
            ours, theirs = row["ours_bytes"] / 1e6, row[f"{key}_bytes"] / 1e6
            yield _compared(f"{row['case']}, {row['pairs']} pairs", ours, theirs, "MB", against)


def _redistribute(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        yield Row(
            name=f"{row['part']}, {row['case']}",
            ours=row["ours_us"],
            peer=row["torch_us"],
            unit="us",
            against="torch",
            ratio=1 / row["ratio"],
            low=1 / row["ratio_high"],
            high=1 / row["ratio_low"],
        )
        if "bare_us" in row:
            yield Row(
                name=f"{row['part']}, {row['case']}",
                ours=row["ours_us"],
                peer=row["bare_us"],
                unit="us",
                against="the bare collective",
                ratio=row["over_bare"],
                low=row["over_bare_low"],
                high=row["over_bare_high"],
            )


def _balance(result: Json) -> Iterator[Row]:
    fixed = next(row for row in result["rows"] if row["placement"] == "contiguous")
    for row in result["rows"]:
        for key in ("mean", "worst"):
            if row is not fixed:
                name = f"{row['placement']}, {key} step"
                yield _compared(name, row[key], fixed[key], "most load / mean", "contiguous")


def _case_of_ep(row: Json) -> str:
    sizes = ("ranks", "tokens", "dim", "hidden", "experts", "top_k", "skew")
    return ", ".join(f"{key} {row[key]:g}" for key in sizes if row.get(key))


def _dispatch(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        theirs = row["arms"]["theirs"]
        for name, arm in row["arms"].items():
            if name in ("AllToAll", "Dedup"):
                yield Row(
                    name=f"{_case_of_ep(row)}: {name}",
                    ours=arm["ms"],
                    peer=theirs["ms"],
                    unit="ms",
                    against="torchtitan",
                    ratio=arm["ratio"],
                    low=arm["ratio_low"],
                    high=arm["ratio_high"],
                )


def _memory_of_ep(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        peaks = {name: peak / 2**20 for name, peak in row["peak_bytes"].items()}
        for name, peak in peaks.items():
            if name != "theirs":
                case = f"{_case_of_ep(row)}: {name}"
                yield _compared(case, peak, peaks["theirs"], "MiB", "torchtitan")


def _rows_of_ep(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        name, _, against = row["name"].partition(" / ")
        if against:
            yield Row(name=name, ours=None, against=against, ratio=row["value"])
        else:
            yield Row(name=name, ours=row["value"], unit="relative to the largest value")


def _build(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        world = f"{row['world']:,} ranks"
        for arm in ("flattened", "unflattened"):
            yield Row(
                name=world,
                ours=1e3 * row["ours_seconds"],
                peer=1e3 * row[f"{arm}_seconds"],
                unit="ms",
                against=f"torch, {arm}",
                ratio=1 / row[f"{arm}_ratio"],
                low=1 / row[f"{arm}_ratio_high"],
                high=1 / row[f"{arm}_ratio_low"],
            )
        yield Row(name=f"{world}, layout only", ours=1e3 * row["layout_seconds"], unit="ms")


def _plan(result: Json) -> Iterator[Row]:
    for key, what in (("runs", "calibration"), ("held_out", "held out")):
        for row in result[key]["rows"]:
            name = f"{what}: {row['model']} on {row['world']}, {row['degrees']}"
            for figure, unit in (("seconds", "s"), ("memory", "GiB")):
                if f"{figure}_published" in row:
                    ours = row["seconds" if figure == "seconds" else "memory_gib"]
                    published = row[f"{figure}_published"]
                    yield _compared(f"{name}, {figure}", ours, published, unit, "published")
    for row in result["planning"]:
        name = f"planning of llama3-405b on {row['world']:,} devices"
        yield Row(name=name, ours=row["seconds"], unit="s")


def _whole(result: Json) -> Iterator[Row]:
    for row in result["rows"]:
        hp, other = row["hp"], row["torch"]
        kinds = (("step", "step"), ("above", "above compute"), ("host", "host time above compute"))
        for key, what in kinds:
            each = row[key]
            low, high = each["quartiles"] or (None, None)
            yield Row(
                name=f"{row['case']}: {what}",
                ours=each["ours_ms"],
                peer=each["theirs_ms"],
                unit="ms",
                against="torch",
                ratio=each["ratio"],
                low=low,
                high=high,
            )
        each = row["bare"]
        bare = f"{row['case']}: bare collectives above compute"
        yield Row(name=bare, ours=each["ours_ms"], unit="ms")
        yield Row(name=f"{row['case']}: compute", ours=row["compute"]["ms"], unit="ms")
        yield Row(
            name=f"{row['case']}: rounds left out", ours=row["discarded_rounds"], unit="rounds"
        )
        speeds = hp["tokens_per_second"], other["tokens_per_second"]
        # The chart has ratios that are better if they are smaller.
        name = f"{row['case']}: tokens/s"
        yield Row(name=name, ours=speeds[0], peer=speeds[1], unit="tokens/s", against="torch")
        ours, theirs = hp["peak_bytes"] / 1e6, other["peak_bytes"] / 1e6
        yield _compared(f"{row['case']}: peak memory", ours, theirs, "MB", "torch")
        ours, theirs = (sum(side["received_bytes"].values()) / 1e6 for side in (hp, other))
        yield _compared(f"{row['case']}: received", ours, theirs, "MB", "torch")
        for setting, ms in hp["candidates_ms"].items():
            yield Row(name=f"{row['case']}: setting {setting}", ours=ms, unit="ms")
        for setting, ms in other["candidates_ms"].items():
            yield Row(name=f"{row['case']}: setting {setting}", ours=None, peer=ms, unit="ms")


CONVERTERS: dict[str, Callable[[Json], Iterator[Row]]] = {
    "hp-mesh/build": _build,
    "hp-mesh/plan": _plan,
    "hp-dtensor/bytes": _bytes,
    "hp-dtensor/plans": _times({"plan_us": "new", "kept_us": "known"}, "us"),
    "hp-dtensor/redistribute": _redistribute,
    "hp-fsdp/copies": _against_arm("copied_in_p", "of all parameters"),
    "hp-fsdp/gather": _gather,
    "hp-fsdp/host": _arms_of_fsdp,
    "hp-fsdp/memory": _against_arm("peak_mb", "MB", ", peak"),
    "hp-fsdp/padding": _padding,
    "hp-fsdp/step": _arms_of_fsdp,
    "hp-cp/attention": _attention,
    "hp-cp/documents": _documents,
    "hp-cp/host": _host_of_cp,
    "hp-cp/plans": _times({"cold_ms": "new", "warm_ms": "known"}, "ms"),
    "hp-ep/balance": _balance,
    "hp-ep/dispatch": _dispatch,
    "hp-ep/memory": _memory_of_ep,
    "hp-ep/rows": _rows_of_ep,
    "tools/whole": _whole,
}


def rows_of(benchmark: str, result: Json) -> list[Json]:
    """Return the rows of a benchmark such as ``hp-mesh/build`` from its JSON."""
    return [asdict(row) for row in CONVERTERS[benchmark](result)]
