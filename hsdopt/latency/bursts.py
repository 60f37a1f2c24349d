"""Acceptance that comes in bursts: a hidden state per token, its fit, and the tokens and seconds it predicts.

A survival curve taken at evenly spread positions over-counts long accepted runs, since a round starts behind a
rejection. Here every token has a hidden state: the state emits (its token is accepted with the rate of the state),
then moves by one transition matrix. One state is the iid rate.

Source: derived for this package. With rates ``a`` and transition ``P`` let ``B = diag(a) P`` and
``C = diag(1 - a) P``. A round over a draft of ``L`` tokens that accepts ``m < L`` of them moves the state by
``B^m C``, a fully accepted one by ``B^L P``. Their sum ``K`` has the stationary distribution ``pi = pi K`` of the
states in which rounds start, and ``E[N] = pi (1 + B + ... + B^L) 1``. The fit is expectation-maximisation
(Baum et al. 1970) in the scaled form of Rabiner 1989.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hsdopt.checks import Cost, FloatArray, as_cost, check_count, check_length, check_rates
from hsdopt.errors import InvalidArgumentError

Outputs: TypeAlias = Sequence[Sequence[float] | Sequence[bool] | NDArray[Any]]
"""Per output, the agreement at each position: a truth value, or a chance between 0 and 1."""
Pair = TypeVar("Pair")

_ROUNDING = 1e-9  # what a row of chances read back from a file may be off by
_FLOOR = 1e-12  # rates this close to 0 or 1 count as that, so that logarithms stay finite
_PASSES = 200  # most passes of expectation-maximisation
_TOLERANCE = 1e-7  # gain in nats per position at which it stops
_COARSE = 1e-6  # the same, where fits are only compared
_GAIN = 1e-6  # held-out nats per position under which two numbers of states are as good
_FOLDS = 5  # parts of the outputs that are held out in turn
_STARTS = ((0.5, 0.6), (0.5, 0.95), (0.9, 0.6), (0.9, 0.95))  # spread of the rates, chance to stay


@dataclass(frozen=True, slots=True)
class BurstModel:
    """Acceptance by hidden states: the state of a token emits, then moves.

    Attributes
    ----------
    acceptance : tuple of float
        For each state, the chance that its token is accepted.
    transition : tuple of tuple of float
        ``transition[i][j]``, the chance that the next token's state is ``j`` behind state ``i``; rows sum to 1.

    Raises
    ------
    InvalidArgumentError
        If a rate or chance leaves [0, 1], the matrix is not square, or a row does not sum to 1.

    Examples
    --------
    >>> model = BurstModel((0.9, 0.1), ((0.9, 0.1), (0.2, 0.8)))
    >>> round(model.rate, 6)
    0.633333
    """

    acceptance: tuple[float, ...]
    transition: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Bring both to tuples and refuse what is no model."""
        rates = check_rates(self.acceptance, "acceptance")
        if rates.ndim != 1 or rates.size == 0:
            raise InvalidArgumentError(f"expected acceptance to hold one rate per state; got {self.acceptance!r}")
        chances = check_rates(self.transition, "transition")
        if chances.shape != (rates.size, rates.size):
            raise InvalidArgumentError(
                f"expected transition to have {rates.size} rows of {rates.size} chances, one for each state; "
                f"got shape {chances.shape}"
            )
        sums = chances.sum(axis=1)
        if not (np.abs(sums - 1.0) <= _ROUNDING).all():
            worst = int(np.argmax(np.abs(sums - 1.0)))
            raise InvalidArgumentError(
                f"expected every row of transition to sum to 1; row {worst} sums to {sums[worst]}"
            )
        object.__setattr__(self, "acceptance", tuple(rates.tolist()))
        object.__setattr__(self, "transition", tuple(tuple(row) for row in chances.tolist()))

    @property
    def rate(self) -> float:
        """The share of all positions whose token is accepted."""
        return float(_stationary(np.array(self.transition)) @ np.array(self.acceptance))

    def survival(self, length: int) -> FloatArray:
        """Return ``S[0..length]`` averaged over all positions, which is not how rounds start: see the module.

        Raises
        ------
        InvalidArgumentError
            If the length is not a whole number of at least 0.

        Examples
        --------
        >>> BurstModel((0.5,), ((1.0,),)).survival(2).tolist()
        [1.0, 0.5, 0.25]
        """
        runs = _runs(self, check_length(length, "length"))
        return np.asarray(runs.sum(axis=2) @ _stationary(np.array(self.transition)))


def tokens_per_pass(
    burst_model: BurstModel, draft_length: int, *, proposal: Sequence[float] | FloatArray | None = None
) -> float:
    """Return the expected tokens gained by one verify pass in the long run.

    Parameters
    ----------
    burst_model
        The states, their rates and how they move.
    draft_length
        Tokens asked for per verify pass, ``L``.
    proposal
        ``proposal[n]``, the chance that a drafter that is asked for ``L`` tokens proposes ``n``, for
        ``n = 0..L``, drawn anew each round whatever the state; sums to 1. None: it always proposes ``L``. The
        rates of the model are then those of tokens that were proposed.

    Returns
    -------
    float
        Tokens per pass, between 1 and ``draft_length + 1``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or `proposal` has another length or sum.

    Notes
    -----
    With ``Q(m)`` the chance of at least ``m`` proposed tokens, ``E[N] = pi sum_m Q(m) B^m 1``, where ``pi`` is
    stationary under ``K = sum_m (Q(m + 1) B^m C + proposal[m] B^m P)``. Where the states fall into closed sets
    that never meet, each set weighs by its number of states.

    Examples
    --------
    >>> tokens_per_pass(BurstModel((0.5,), ((1.0,),)), 2)
    1.75
    >>> round(tokens_per_pass(BurstModel((0.9, 0.1), ((0.9, 0.1), (0.2, 0.8))), 2), 6)
    1.883932
    >>> tokens_per_pass(BurstModel((0.5,), ((1.0,),)), 2, proposal=[0.5, 0.5, 0.0])
    1.25
    """
    length = check_length(draft_length)
    chances = _proposal(proposal, length)
    reach = chances[::-1].cumsum()[::-1]
    runs = _runs(burst_model, length)
    ends = _round_ends(burst_model, runs, chances)
    return float(reach @ (runs.sum(axis=2) @ _stationary(ends.sum(axis=0))))


def hierarchy_seconds_per_token(
    burst_models: Sequence[BurstModel], costs: Sequence[Cost], draft_lengths: Sequence[int]
) -> float:
    """Return the expected seconds per emitted token of a stack whose levels share the hidden states.

    Parameters
    ----------
    burst_models
        For each model below the target, bottom first: how the next model accepts its tokens. All have the same
        transition.
    costs
        For each model, bottom first, the target last: the seconds of one pass, a number or a function of the new
        tokens of the pass.
    draft_lengths
        For each model below the target, the tokens it passes up per request; surplus tokens are discarded.

    Returns
    -------
    float
        Seconds per token, in the unit of the costs.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, a list has the wrong length, or the transitions differ.

    Notes
    -----
    A request for ``t`` tokens that finds state ``z`` takes ``F_i(z, t) = F_{i-1}(z, T_{i-1}) + c_i(T_{i-1} + 1) +
    sum_m sum_z' G_m(z, z') F_i(z', t - 1 - m)`` seconds, with ``F(., t <= 0) = 0`` and ``G_m`` the moves of a round
    that accepts ``m`` tokens; the target's rounds start in their stationary distribution.

    Examples
    --------
    >>> once = ((1.0,),)
    >>> stack = [BurstModel((0.6,), once), BurstModel((0.8,), once), BurstModel((0.9,), once)]
    >>> round(hierarchy_seconds_per_token(stack, [0.01, 0.05, 0.2, 1.0], [2, 4, 12]), 9)
    0.334512872
    """
    check_count(draft_lengths, len(burst_models), "one draft length for each model below the target")
    check_count(costs, len(burst_models) + 1, "one cost for each model, the target's last")
    lengths = [check_length(length, f"draft_lengths[{i}]") for i, length in enumerate(draft_lengths)]
    curves = [as_cost(cost, f"costs[{i}]") for i, cost in enumerate(costs)]
    if not lengths:
        return curves[0](1)
    if any(model.transition != burst_models[0].transition for model in burst_models):
        raise InvalidArgumentError(
            "expected one transition for all levels; got several: fit the pairs together, as one dict"
        )
    states = len(burst_models[0].acceptance)
    seconds = np.full(states, lengths[0] * curves[0](1) if lengths[0] else 0.0)
    for model, curve, below, owed in zip(burst_models, curves[1:], lengths, lengths[1:], strict=False):
        whole = seconds + curve(below + 1)
        seconds = _request_seconds(model, whole, below, owed) if owed else np.zeros(states)
    runs = _runs(burst_models[-1], lengths[-1])
    ends = _round_ends(burst_models[-1], runs, _proposal(None, lengths[-1]))
    start = _stationary(ends.sum(axis=0))
    tokens = float((runs.sum(axis=2) @ start).sum())
    return (float(start @ seconds) + curves[-1](lengths[-1] + 1)) / tokens


@overload
def fit(outputs: Mapping[Pair, Outputs], *, states: int = 2) -> dict[Pair, BurstModel]: ...
@overload
def fit(outputs: Outputs, *, states: int = 2) -> BurstModel: ...
def fit(outputs: Outputs | Mapping[Pair, Outputs], *, states: int = 2) -> BurstModel | dict[Pair, BurstModel]:
    """Return the burst model of agreement along outputs, with as few states as held-out likelihood wants.

    Parameters
    ----------
    outputs
        Per output, an array of the agreement at each position: booleans where tokens are either accepted or not,
        else the chance in [0, 1] that the token is accepted. Or a dict from pair to such outputs, position by
        position the same for all pairs: then the pairs share states and transition.
    states
        Most hidden states to consider; fewer are taken where more do not raise the held-out likelihood by more than
        one standard error of that gain over the outputs (see `held_out_likelihood`).

    Returns
    -------
    BurstModel or dict
        One model, or one for each pair; states in descending order of their rate (the mean over the pairs).

    Raises
    ------
    InvalidArgumentError
        If there is no position, a value leaves [0, 1], or the pairs differ in their outputs.

    Notes
    -----
    Maximum likelihood by expectation-maximisation from fixed starting points, the state of an output's first token
    free. A chance ``x`` weighs as ``x`` accepted and ``1 - x`` refused tokens, so that the rate of one state is
    the mean. An outcome is the same every time: nothing is drawn.

    Examples
    --------
    >>> fit([[True, False], [False, True]]).acceptance
    (0.5,)
    """
    most = check_length(states, "states", minimum=1)
    evidence, pairs = _evidence(outputs)
    chosen = 1 if most == 1 else _states_that_pay(evidence, most)
    rates, transition = _ordered(*_maximise(evidence, chosen, evidence.everything())[:2])
    moves = tuple(map(tuple, transition.tolist()))
    models = [BurstModel(tuple(row), moves) for row in rates.tolist()]
    return models[0] if pairs is None else dict(zip(pairs, models, strict=True))


def held_out_likelihood(outputs: Outputs | Mapping[Any, Outputs], *, states: int = 2) -> float:
    """Return the log-likelihood per position, in nats, of outputs that the fit has not seen.

    Parameters
    ----------
    outputs
        As for `fit`.
    states
        Hidden states, exactly.

    Returns
    -------
    float
        At most 0, the mean over all positions; with several pairs, their sum at a position. Greater is better.

    Raises
    ------
    InvalidArgumentError
        As for `fit`.

    Notes
    -----
    Cross-validated: output ``i`` is held out with all ``i + 5 n``, and scored by the fit of the others. A single
    output is cut into five pieces. No held-out rate is taken to be nearer to 0 or 1 than ``1 / (n + 2)``, ``n`` the
    positions of the fit.

    Examples
    --------
    >>> bursty = [[1] * 30 + [0] * 30] * 4
    >>> held_out_likelihood(bursty, states=2) > held_out_likelihood(bursty, states=1)
    True
    """
    count = check_length(states, "states", minimum=1)
    evidence, _ = _evidence(outputs)
    return float(_held_out(evidence, count).sum() / evidence.present.sum())


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Agreement ``values[position, output, pair]``, zero where ``present[position, output]`` is not set."""

    values: FloatArray
    present: FloatArray

    def everything(self) -> FloatArray:
        """Return the weights of the one fit that sees all outputs, ``[1, output]``."""
        return np.ones((1, self.values.shape[1]))

    def folds(self) -> FloatArray:
        """Return the outputs that each fold holds out, ``[fold, output]``."""
        count = self.values.shape[1]
        folds = min(_FOLDS, count)
        held = np.arange(count) % folds == np.arange(folds)[:, np.newaxis]
        return np.asarray(held, dtype=np.float64)

    def cut(self) -> _Evidence:
        """Return the evidence with a single output cut into as many pieces as there are folds."""
        length, count, pairs = self.values.shape
        if count > 1:
            return self
        pieces = np.array_split(self.values[:, 0], min(_FOLDS, length))
        values, present = np.zeros((len(pieces[0]), len(pieces), pairs)), np.zeros((len(pieces[0]), len(pieces)))
        for index, piece in enumerate(pieces):
            values[: len(piece), index], present[: len(piece), index] = piece, 1.0
        return _Evidence(values, present)


def _evidence(outputs: Any) -> tuple[_Evidence, list[Any] | None]:  # noqa: ANN401
    """Return checked, padded agreement, and the pairs if there are several."""
    pairs = list(outputs) if isinstance(outputs, Mapping) else None
    columns = [outputs[pair] for pair in pairs] if pairs is not None else [outputs]
    arrays = [
        [check_rates(output, f"agreement in output {i}") for i, output in enumerate(column)] for column in columns
    ]
    shapes = [[array.shape for array in column] for column in arrays]
    if any(len(shape) != 1 for column in shapes for shape in column):
        raise InvalidArgumentError("expected one list of agreement per output; got other shapes: pass a list of arrays")
    if not shapes or any(column != shapes[0] for column in shapes):
        raise InvalidArgumentError(
            "expected agreement at the same positions of the same outputs for every pair; got other lengths: "
            "cut them to the positions that all pairs cover"
        )
    lengths = np.array([shape[0] for shape in shapes[0] if shape[0]], dtype=int)
    if not lengths.size:
        raise InvalidArgumentError("expected outputs with at least one position; got none: collect agreement first")
    values = np.zeros((lengths.max(), lengths.size, len(arrays)))
    for pair, column in enumerate(arrays):
        for index, array in enumerate(array for array in column if array.size):
            values[: array.size, index, pair] = array
    present = (np.arange(lengths.max())[:, np.newaxis] < lengths).astype(float)
    return _Evidence(values, present), pairs


def _states_that_pay(evidence: _Evidence, most: int) -> int:
    """Return the fewest states whose held-out gain over fewer is more than one standard error of it."""
    chosen, scores = 1, _held_out(evidence, 1)
    for states in range(2, most + 1):
        more = _held_out(evidence, states)
        gains = more - scores
        error = gains.std(ddof=1) * np.sqrt(len(gains)) if len(gains) > 1 else np.inf
        if gains.sum() > error + _GAIN * evidence.present.sum():
            chosen, scores = states, more
    return chosen


def _held_out(evidence: _Evidence, states: int) -> FloatArray:
    """Return the log-likelihood of every output (or piece of the only one) by the fit of the other folds."""
    parts = evidence.cut()
    held = parts.folds()
    seen = 1.0 - held if len(held) > 1 else held  # one position alone can only score itself
    rates, transition, start = _maximise(parts, states, seen, _COARSE)
    positions = seen @ parts.present.sum(axis=0)
    margin = (1.0 / (positions + 2.0))[:, np.newaxis, np.newaxis]
    scores = _expect(parts, np.clip(rates, margin, 1.0 - margin), transition, start).likelihood
    return np.asarray((scores * held).sum(axis=0))


def _ordered(rates: FloatArray, transition: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the first fit's rates ``[pair, state]`` and transition, states by descending mean rate."""
    order = np.argsort(-rates[0].mean(axis=0), kind="stable")
    chances = transition[0][np.ix_(order, order)]
    return rates[0][:, order], chances / chances.sum(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What one pass over the evidence says: likelihoods, state chances, expected moves (for every fit)."""

    likelihood: FloatArray  # [fit, output], nats
    chances: FloatArray  # [position, fit, output, state]
    moves: FloatArray  # [fit, output, state, state]


def _maximise(
    evidence: _Evidence, states: int, weights: FloatArray, tolerance: float = _TOLERANCE
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return rates ``[fit, pair, state]``, transition and start of the likeliest fit for every row of weights."""
    starts = _STARTS if states > 1 else _STARTS[:1]
    rows = np.repeat(weights, len(starts), axis=0)
    rates, transition, start = _starting_points(evidence, states, weights, starts)
    positions = rows @ evidence.present.sum(axis=0)
    before = np.full(len(rows), -np.inf)
    for _ in range(_PASSES):
        expected = _expect(evidence, rates, transition, start)
        after = (expected.likelihood * rows).sum(axis=1) / positions
        if (after - before <= tolerance).all():
            break
        rates, transition, start = _reestimate(evidence, expected, rows, rates, transition)
        before = after
    best = after.reshape(len(weights), -1).argmax(axis=1) + np.arange(len(weights)) * len(starts)
    return rates[best], transition[best], start[best]


def _starting_points(
    evidence: _Evidence, states: int, weights: FloatArray, starts: Sequence[tuple[float, float]]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return fixed starting points: rates spread about the mean, states that tend to stay."""
    totals = np.einsum("fo,top->fp", weights, evidence.values)
    mean = (totals / (weights @ evidence.present.sum(axis=0))[:, np.newaxis])[:, np.newaxis, :, np.newaxis]
    spread = np.array([s for s, _ in starts])[:, np.newaxis, np.newaxis]
    side = np.linspace(1.0, -1.0, states) if states > 1 else np.zeros(1)
    side = _directions(evidence)[:, np.newaxis] * side
    offset = spread * side * np.where(side > 0, 1.0 - mean, mean)
    rates = (mean + offset).reshape(-1, evidence.values.shape[2], states)
    stay = np.array([chance for _, chance in starts])[:, np.newaxis, np.newaxis]
    others = (1.0 - stay) / max(states - 1, 1)
    moves = np.where(np.eye(states, dtype=bool), stay, others) if states > 1 else np.ones((len(starts), 1, 1))
    transition = np.tile(moves, (len(weights), 1, 1))
    return rates, transition, np.full((len(rates), states), 1.0 / states)


def _directions(evidence: _Evidence) -> FloatArray:
    """Return for each pair 1, or -1 if it tends to agree where the first pair does not."""
    agreement = evidence.values[evidence.present > 0.0]
    about = agreement - agreement.mean(axis=0)
    return np.where(about[:, 0] @ about < 0.0, -1.0, 1.0)


def _expect(evidence: _Evidence, rates: FloatArray, transition: FloatArray, start: FloatArray) -> _Expected:
    """Run forward and backward over all outputs and fits at once, scaled at every position."""
    kept = np.clip(rates, _FLOOR, 1.0 - _FLOOR)
    scores = np.einsum("top,fps->tfos", evidence.values, np.log(kept) - np.log1p(-kept))
    scores += evidence.present[:, np.newaxis, :, np.newaxis] * np.log1p(-kept).sum(axis=1)[:, np.newaxis, :]
    highest = scores.max(axis=3)
    emission = np.exp(scores - highest[..., np.newaxis])
    forward, scale = np.empty_like(emission), np.empty_like(highest)
    ahead = np.broadcast_to(start[:, np.newaxis, :], emission.shape[1:])
    for position, emitted in enumerate(emission):
        joint = ahead * emitted
        scale[position] = np.maximum(joint.sum(axis=2), np.finfo(float).tiny)
        forward[position] = joint / scale[position][..., np.newaxis]
        ahead = forward[position] @ transition
    backward = np.ones_like(emission)
    emission /= scale[..., np.newaxis]
    back = transition.swapaxes(1, 2)
    for position in range(len(emission) - 1, 0, -1):
        backward[position - 1] = (emission[position] * backward[position]) @ back
    # padding emits with chance 1 in every state, so that its factors are those of the last token
    arriving = emission[1:] * backward[1:] * evidence.present[1:, np.newaxis, :, np.newaxis]
    moves = np.einsum("tfoi,tfoj->foij", forward[:-1], arriving, optimize=True)
    likelihood = (np.log(scale) + highest).sum(axis=0)
    return _Expected(likelihood, forward * backward, moves * transition[:, np.newaxis])


def _reestimate(
    evidence: _Evidence, expected: _Expected, rows: FloatArray, rates: FloatArray, transition: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the rates, transition and start that the expected states make likeliest; unvisited ones stay."""
    weighted = expected.chances * rows[:, :, np.newaxis] * evidence.present[:, np.newaxis, :, np.newaxis]
    visits = weighted.sum(axis=(0, 2))[:, np.newaxis, :]
    accepted = np.einsum("tfos,top->fps", weighted, evidence.values, optimize=True)
    tiny = np.finfo(float).tiny
    rates = np.clip(np.where(visits > _FLOOR, accepted / np.maximum(visits, tiny), rates), 0.0, 1.0)
    moves = np.einsum("fo,foij->fij", rows, expected.moves)
    leaving = moves.sum(axis=2, keepdims=True)
    transition = np.where(leaving > _FLOOR, moves / np.maximum(leaving, tiny), transition)
    first = weighted[0].sum(axis=1)
    return rates, transition, first / first.sum(axis=1, keepdims=True)


def _proposal(proposal: Sequence[float] | FloatArray | None, length: int) -> FloatArray:
    if proposal is None:
        always = np.zeros(length + 1)
        always[length] = 1.0
        return always
    chances = check_rates(proposal, "proposal")
    if chances.shape != (length + 1,) or abs(float(chances.sum()) - 1.0) > _ROUNDING:
        raise InvalidArgumentError(
            f"expected proposal to hold the chances of 0 to {length} proposed tokens, {length + 1} that sum to 1; "
            f"got {chances.tolist()}"
        )
    return chances


def _runs(model: BurstModel, length: int) -> FloatArray:
    """Return ``B^m`` for ``m = 0..length``, shape ``[length + 1, state, state]``."""
    accepting = np.array(model.acceptance)[:, np.newaxis] * np.array(model.transition)
    runs = np.empty((length + 1, *accepting.shape))
    runs[0] = np.eye(len(accepting))
    for m in range(length):
        runs[m + 1] = runs[m] @ accepting
    return runs


def _round_ends(model: BurstModel, runs: FloatArray, proposal: FloatArray) -> FloatArray:
    """Return ``G_m``, how a round that accepts ``m`` tokens moves the state, shape ``[m, state, state]``."""
    transition = np.array(model.transition)
    refusing = (1.0 - np.array(model.acceptance))[:, np.newaxis] * transition
    longer = np.append(proposal[::-1].cumsum()[::-1][1:], 0.0)
    return np.asarray(
        longer[:, np.newaxis, np.newaxis] * (runs @ refusing)
        + proposal[:, np.newaxis, np.newaxis] * (runs @ transition)
    )


def _request_seconds(model: BurstModel, round_seconds: FloatArray, below: int, owed: int) -> FloatArray:
    """Return the seconds in which a level gathers ``owed`` tokens, for every state that a request may find."""
    ends = _round_ends(model, _runs(model, below), _proposal(None, below))
    seconds = np.zeros((owed + 1, len(round_seconds)))
    for tokens in range(1, owed + 1):
        gained = min(tokens, below + 1)  # rounds that gain more leave nothing to do
        left = seconds[tokens - gained : tokens][::-1]
        seconds[tokens] = round_seconds + np.einsum("mij,mj->i", ends[:gained], left)
    return np.asarray(seconds[owed])


def _stationary(moves: FloatArray) -> FloatArray:
    """Return the distribution that a stochastic matrix keeps; closed sets weigh by their numbers of states."""
    reach = (moves > 0.0) | np.eye(len(moves), dtype=bool)
    for _ in moves:
        reach = reach @ reach
    held = np.zeros(len(moves))
    for state, reached in enumerate(reach):
        members = np.flatnonzero(reached)
        closed = reach[members, state].all()  # whatever it reaches leads back to it
        if closed and state == members[0]:
            held[members] = len(members) * _kept_by_irreducible(moves[np.ix_(members, members)])
    return np.asarray(held / held.sum())


def _kept_by_irreducible(moves: FloatArray) -> FloatArray:
    """Return the stationary distribution by Grassmann, Taksar and Heyman's elimination, which never subtracts."""
    left = moves.copy()
    for state in range(len(left) - 1, 0, -1):
        left[:state, state] /= left[state, :state].sum()
        left[:state, :state] += np.outer(left[:state, state], left[state, :state])
    held = np.ones(len(left))
    for state in range(1, len(left)):
        held[state] = held[:state] @ left[:state, state]
    return np.asarray(held / held.sum())
