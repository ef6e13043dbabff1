"""What a model has against degrees that make no world."""

from collections.abc import Mapping
from typing import Any

from .._degrees import PEER_AXES, Degree, as_degree
from .._errors import ParallelDimsError, Violation
from .._model import read_numbers
from .._rules import Subject, check_rules


def judge_apart(
    fields: Mapping[str, Any],
    model: object,
    seq_len: int | None,
    global_batch: int | None,
    causal_balance: bool,
    sequence_parallel: bool,
) -> tuple[Violation, ...]:
    """Return the errors of models that stay errors whatever the unknown degrees become.

    ``fields`` are as given, some perhaps no degrees. An unknown degree counts as 1: all rules that
    find errors ask for products of degrees to divide or to stay below a number, so that more ranks
    repair nothing.
    """
    numbers, wrong = read_numbers(model, seq_len, global_batch)
    degrees = {
        name: _known(name, fields.get(name)) for name in (*PEER_AXES, "etp", "ulysses_degree")
    }
    peer = fields.get("ep_mode") == "peer"
    subject = Subject(
        degrees=degrees,
        sharding=("dp_shard", "ep") if peer else ("dp_shard",),
        numbers=numbers,
        wrong=wrong,
        causal_balance=causal_balance,
        sequence_parallel=sequence_parallel,
    )
    return check_rules(subject).errors


def _known(name: str, value: Degree) -> int:
    try:
        return as_degree(name, value, inferable=False, optional=True) or 1
    except ParallelDimsError:
        return 1
