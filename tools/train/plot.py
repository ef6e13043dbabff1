"""The loss curves of a run and of its single-process reference, on one axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN, REFERENCE, HELD_OUT, INK = "#1f4e9c", "#f0a84b", "#b0303a", "#404040"


@dataclass(frozen=True, slots=True)
class Difference:
    """The step with the largest difference of two curves, and the difference.

    ``relative`` is relative to the second curve.
    """

    step: int
    relative: float


def largest_difference(
    losses: Mapping[int, float], reference: Mapping[int, float]
) -> Difference | None:
    """Return the largest difference of two curves (loss by step), None without a shared step.

    The difference of a loss that is not finite is infinite.
    """
    shared = [step for step in losses if step in reference]
    found = [Difference(step, _relative(losses[step], reference[step])) for step in shared]
    return max(found, key=lambda difference: difference.relative, default=None)


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
    """Write ``loss.png`` and ``loss.svg`` to a folder.

    Needs matplotlib, which takes a second to load, and raises its errors.

    Args:
        losses: Loss by step, in nats per ``unit``.
        reference: The same of the single-process run.
        title: Appended to the title of the picture.
        folder: Existing folder.
        unit: Name of a token.
        held_out: Loss of held-out text by step.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no display

    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    # The reference is wide and behind the run, which lies inside it if they agree.
    wide: dict[str, Any] = {"linewidth": 6, "solid_capstyle": "round"}
    dots: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 4}
    for curve, color, label, style in (
        (reference, REFERENCE, "one process, no parallelism", wide),
        (losses, RUN, "this run", {"linewidth": 1.6}),
        (held_out, HELD_OUT, "held-out text", dots),
    ):
        if curve:
            axes.plot(list(curve), list(curve.values()), color=color, label=label, **style)
    axes.set_title(f"Training loss, {title}", fontsize=11, color=INK, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per {unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    if (difference := largest_difference(losses, reference)) is not None:
        text = f"largest difference: {difference.relative:.1e} relative, at step {difference.step}"
        axes.text(0.02, 0.05, text, transform=axes.transAxes, color=INK)
    figure.savefig(folder / "loss.png", dpi=150)
    figure.savefig(folder / "loss.svg")
    pyplot.close(figure)
