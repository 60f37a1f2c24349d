"""Kinds of failure that users of speculative decoding report, and the tests that would see each.

`KINDS` maps every kind to the tests that cover it, here or in another file; the last test holds the map to the files.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from mocks import scheduled_models, table_model
from stack import call, make_stack, profile_arguments, refused
from test_sampling import Shaky, warped
from tiny import VOCAB, WINDOW, save_tiny, tiny_model, tiny_network, tiny_tokenizer

from hsdopt.acceptance import Acceptance, Traces
from hsdopt.costs import CostCurve, CostSample
from hsdopt.errors import CacheError, InvalidArgumentError, ModelError, PredictionError, ProfileError
from hsdopt.latency import expected_latency
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, Plan, parse_plan
from hsdopt.profiles import ModelInfo, Profile, Setting
from hsdopt.profiling import profile as measure
from hsdopt.profiling.acceptance import PromptTrace, assemble, score_output
from hsdopt.profiling.cost import measure_costs
from hsdopt.profiling.measure import cost_curves, leave_one_out, lookup_table
from hsdopt.profiling.workload import Prompt, Workload
from hsdopt.runtime import Model, generate, load_models, near_tie
from hsdopt.runtime import models as loading
from hsdopt.runtime import sampling as rules
from hsdopt.runtime.early_exit import first_layers
from hsdopt.runtime.events import Counters
from hsdopt.runtime.lookup import Lookup
from hsdopt.simulate import replay, simulate
from hsdopt.simulate.compare import Mismatch, Predictions, Run, compare
from hsdopt.solvers.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

torch.set_num_threads(1)
PROMPT = [70, 71, 72, 70, 71]

KINDS: dict[str, tuple[str, ...]] = {
    # slower than plain decoding
    "verifying n tokens costs much more than one": (
        "test_failures.py::test_verifying_n_tokens_costs_much_more_than_one",
        "test_latency_cases.py::test_a_dear_verify_pass_decides_against_speculation",
        "test_solve.py::test_field_reports_are_decided_right",
        "test_cli_solve.py::test_do_not_speculate",
    ),
    "a drafter nearly as slow as the target": (
        "test_failures.py::test_drafter_nearly_as_slow_as_the_target",
        "test_latency_cases.py::test_a_slow_drafter_that_still_pays",
        "test_solve_uncertainty.py::test_three_per_cent_on_either_side_of_break_even_flip_the_answer",
    ),
    "a free drafter still makes the target pay c(L + 1)": (
        "test_failures.py::test_a_free_drafter_still_makes_the_target_pay",
        "test_decode.py::test_passes_and_new_tokens_of_a_hand_worked_stack",
    ),
    "draft length far from the optimum": (
        "test_latency_exact.py::test_best_draft_length_is_the_first_best",
        "test_solve.py::test_hierarchy_of_a_measured_profile_is_the_best_of_all_stacks",
        "test_solve.py::test_cascade_is_the_best_of_all_rows_at_all_levels",
    ),
    "acceptance differs by half between prompts": (
        "test_failures.py::test_acceptance_differs_by_half_between_prompts",
        "test_failures.py::test_intervals_are_over_prompts_not_over_repeats",
        "test_compare.py::test_intervals_cover",
        "test_expected.py::test_intervals_cover",
    ),
    "time outside the model left out of the cost": (
        "test_failures.py::test_time_outside_the_model_is_in_the_cost",
        "test_compare.py::test_error_splits_into_acceptance_and_cost",
    ),
    "costs of another device, dtype, thread count or batch size": (
        "test_validate_run.py::test_another_machine_or_thread_count_is_refused",
        "test_cli.py::test_check_exits_with_its_verdict",
        "test_failures.py::test_costs_of_another_dtype_are_not_reused",
        "test_failures.py::test_costs_of_another_batch_size_are_not_reused",
        "test_profiles.py::test_cost_curves_are_linear_between_samples_and_refuse_to_guess",
        "test_expected.py::test_passes_beyond_the_curve",
    ),
    "acceptance biased by confidence stopping": (
        "test_failures.py::test_acceptance_is_not_biased_by_confidence_stopping",
        "test_failures.py::test_acceptance_is_not_biased_by_the_draft_length",
        "test_profiles.py::test_survival_is_read_from_runs_and_cut_runs_bias_nothing",
    ),
    "always 100 % reports": (
        "test_failures.py::test_always_100_per_cent_reports",
        "test_failures.py::test_a_lookup_drafter_is_not_scored_on_what_it_has_seen",
        "test_decode.py::test_a_model_that_drafts_for_itself_is_always_accepted",
    ),
    # output differs from the target's
    "end of text inside a draft": (
        "test_decode.py::test_end_of_text_at_every_position_of_a_draft",
        "test_decode.py::test_several_end_of_text_ids_and_ignoring_them",
        "test_encoder_decoder.py::test_the_end_of_a_text_ends_it_inside_a_draft",
        "test_bild_runtime.py::test_end_of_text_by_the_small_model_is_reviewed_and_nothing_follows_it",
    ),
    "a stop string that spans drafted tokens": (
        "test_decode.py::test_stop_strings_inside_and_across_drafted_tokens",
        "test_decode.py::test_stop_strings_look_through_special_tokens",
    ),
    "the draft distribution scored is not the one sampled from": (
        "test_failures.py::test_draft_distribution_scored_is_the_one_sampled_from",
        "test_sampling.py::test_exact_law_of_every_kind_of_node_with_every_processor_on_both_sides",
        "test_sampling.py::test_a_broken_rule_fails_the_exact_test",
    ),
    "a greedy drafter under a sampling target; temperature 0": (
        "test_sampling.py::test_temperature_zero_is_no_division_and_greedy_drafts_under_sampling_are_one_hot",
        "test_sampling.py::test_a_very_low_temperature_is_almost_greedy",
    ),
    "accept with p q; residual not renormalised; the wrong position's law": (
        "test_sampling.py::test_exact_law_of_every_kind_of_node_with_every_processor_on_both_sides",
        "test_sampling.py::test_exact_law_of_drafts_that_nothing_cuts_short",
        "test_sampling.py::test_a_broken_rule_fails_the_exact_test",
        "test_sampling.py::test_a_broken_rule_fails_the_chi_square_test",
    ),
    "rounding changes with batch shape": (
        "test_failures.py::test_rounding_flips_a_near_tie_and_a_fault_is_none",
        "test_sampling.py::test_near_tie_compares_the_gap_with_four_times_the_difference_between_passes",
        "test_builtin.py::test_greedy_output_is_that_of_transformers_but_for_near_ties",
    ),
    "processors' state not rewound after a rejection": (
        "test_decode.py::test_processors_state_is_not_carried_over_a_rejection",
        "test_sampling.py::test_laws_are_those_of_transformers_with_each_position_s_own_prefix",
    ),
    "the same call twice gives a different trace": (
        "test_failures.py::test_the_same_call_twice_gives_the_same_trace",
        "test_decode.py::test_running_the_same_call_twice_gives_the_same_trace_and_leaves_no_state",
    ),
    # caches
    "a cache that cannot be cropped": (
        "test_failures.py::test_a_cache_that_cannot_be_cropped_is_refused_by_name",
        "test_failures.py::test_a_static_cache_is_not_used",
        "test_failures.py::test_angles_that_change_with_the_length_end_the_positions",
        "test_architectures.py::test_models_that_forget_are_refused_by_name",
        "test_architectures.py::test_a_window_that_the_masks_do_not_know_is_refused",
        "test_encoder_decoder.py::test_decoders_that_forget_are_refused",
    ),
    "crop by too much or too little; one-token prompts; a crop of zero": (
        "test_failures.py::test_crop_after_full_acceptance_leaves_exactly_what_was_fed",
        "test_session.py::test_logits_equal_a_full_pass_after_any_feeding_and_cropping",
        "test_session.py::test_crop_keeps_the_prefix_and_takes_no_negative_length",
        "test_decode.py::test_a_prompt_of_one_token",
    ),
    # vocabularies
    "embedding rows padded differently": (
        "test_failures.py::test_embedding_rows_padded_differently_are_never_profiled_as_tokens",
        "test_architectures.py::test_rows_that_are_padded_differently_do_not_count",
        "test_decode.py::test_padded_ids_are_never_proposed_nor_accepted",
    ),
    "different tokenizers": (
        "test_architectures.py::test_a_permuted_vocabulary_is_refused_with_the_first_difference",
        "test_models.py::test_vocabularies_are_compared_by_token",
    ),
    # lengths and memory
    "beyond a model's positions, the drafter's first": (
        "test_failures.py::test_a_model_with_few_positions_profiles_and_solves",
        "test_failures.py::test_contexts_too_short_for_the_workload_are_refused_before_measuring",
        "test_decode.py::test_a_drafter_whose_positions_run_out_stops_drafting",
        "test_decode.py::test_beyond_the_target_s_positions_is_refused_at_once",
        "test_bild_runtime.py::test_a_small_model_whose_positions_run_out_leaves_the_rest_to_the_large_one",
    ),
    "out of memory while loading the second model": (
        "test_failures.py::test_out_of_memory_of_the_second_model_is_said_before_the_first_is_loaded",
        "test_models.py::test_too_little_memory_is_said_before_loading",
    ),
    "emitted = accepted + passes": (
        "test_failures.py::test_emitted_is_accepted_plus_passes_for_every_reader",
        "test_decode.py::test_held_is_accepted_plus_passes_and_passed_up_is_held_less_discarded",
        "test_simulate.py::test_tokens_are_conserved_at_every_level",
        "test_simulate_replay.py::test_tokens_are_conserved_at_every_level",
    ),
    "per-position counts that increase; a rate above 1": (
        "test_failures.py::test_a_rate_above_1_and_a_rising_curve_are_refused",
        "test_failures.py::test_overlaps_of_equal_laws_stay_at_1",
        "test_decode.py::test_held_is_accepted_plus_passes_and_passed_up_is_held_less_discarded",
        "test_profiles.py::test_laws_sum_to_one_and_survival_is_their_tail",
    ),
}


@lru_cache
def family() -> dict[str, Any]:
    """Return a target, two noisy copies of it and a lookup drafter."""
    made: dict[str, Any] = {
        name: tiny_model(0, name=name, noise=noise) for name, noise in (("t", 0.0), ("m", 0.02), ("s", 0.05))
    }
    return {**made, LOOKUP: Model.of_lookup(Lookup(), made["t"])}


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("session", "workspace", "generate"):
            patch.setattr(sys.modules[f"hsdopt.runtime.{module}"], "perf_counter", lambda: self.now)

    def charge(self, model: Model, cost: Callable[[int], float]) -> Model:
        """Let every pass of `model` over n new tokens take ``cost(n)`` seconds."""

        def spend(_: object, __: object, given: dict[str, torch.Tensor]) -> None:
            self.now += cost(given["input_ids"].shape[1])

        model.network.register_forward_pre_hook(spend, with_kwargs=True)
        return model


# --- slower than plain decoding -------------------------------------------------------------------------------


def timed(cost: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> dict[str, CostCurve]:
    """Return the measured curves of a target that takes ``cost(n)`` seconds, and of a drafter that takes 0.1."""
    clock = Clock(monkeypatch)
    models = {"t": clock.charge(tiny_model(name="t"), cost), "d": clock.charge(tiny_model(name="d"), lambda _: 0.1)}
    return cost_curves(list(measure_costs(models, tokens=range(1, 10), contexts=(8, 16), repeats=2, text=[5, 6, 7])))[1]


def test_verifying_n_tokens_costs_much_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass costs is measured, not assumed: with the same acceptance the answer turns with c(n) alone."""
    for cost, speculate in ((lambda n: 1.0 + 0.01 * n, True), (lambda n: 0.2 + 0.8 * n, False)):
        curves = timed(cost, monkeypatch)
        assert curves["t"].table(9) == pytest.approx([cost(n) for n in range(1, 10)])
        profile = Profile.from_rates("t", curves, {("d", "t"): 0.7})
        found = solve(profile, max_draft_length=8)
        assert found.speculate is speculate
        assert speculate or "do not speculate" in found.warnings[0]
        assert solve(profile.as_iid(), max_draft_length=8).speculate  # one cost per model would have said yes


def test_drafter_nearly_as_slow_as_the_target() -> None:
    slow = Profile.from_rates("t", {"t": 1.0, "d": 0.95}, {("d", "t"): 0.9})
    assert not solve(slow, max_draft_length=8).speculate
    assert all(expected_latency(parse_plan(f"t(d:{n})"), slow).speedup < 1 for n in range(1, 9))
    assert solve(Profile.from_rates("t", {"t": 1.0, "d": 0.4}, {("d", "t"): 0.9}), max_draft_length=8).speculate


def agreeing(tokens: int, *, every: int) -> Traces:
    """Return one output along which the drafter errs at every so-manieth token."""
    said = np.arange(tokens)
    wrong = np.where(said % every == every - 1, -1, said)
    return Traces(said, np.zeros(tokens, dtype=np.int64), 8 + said, {"t": said, "d": wrong})


def test_a_free_drafter_still_makes_the_target_pay() -> None:
    """Every reader charges c(L + 1), so drafts that cost nothing lose where c(n) is linear."""
    costs = {"t": CostCurve.from_function(float, 40), "d": CostCurve.fixed(0.0)}
    for length in (1, 3, 8):
        plan = parse_plan(f"t(d:{length})")
        given = Profile.from_rates("t", costs, {("d", "t"): 0.5})
        estimate = expected_latency(plan, given)
        simulated = simulate(plan, given, tokens=2000)
        replayed = replay(plan, Profile("t", costs, traces=agreeing(400, every=4)), context=0)
        assert estimate.seconds_per_token * estimate.tokens_per_pass == pytest.approx(length + 1)
        assert simulated.seconds_per_token * simulated.tokens_per_pass == pytest.approx(length + 1)
        assert replayed.new_tokens_histogram("t")[length + 1] > 0.9 * replayed.rounds  # the last drafts are shorter
        assert estimate.speedup < 1
    assert not solve(Profile.from_rates("t", costs, {("d", "t"): 0.5}), max_draft_length=8).speculate


def mixed_prompts(rates: Sequence[float], *, length: int = 100) -> Profile:
    """Return a profile whose drafter agrees with the target as often as `rates` say, prompt by prompt."""
    rng = np.random.default_rng(1)
    count = len(rates) * length
    said = rng.integers(0, 50, count)
    agrees = rng.random(count) < np.repeat(rates, length)
    traces = Traces(
        said,
        np.repeat(np.arange(len(rates)), length),
        np.arange(count) % length + 8,
        {"t": said, "d": np.where(agrees, said, -1)},
    )
    return Profile("t", {"t": CostCurve.fixed(1.0), "d": CostCurve.fixed(0.05)}, traces=traces)


def test_acceptance_differs_by_half_between_prompts() -> None:
    """Prompts, not positions, are what a profile has many of: two kinds of prompts widen the interval."""
    plan = parse_plan("t(d:4)")

    def width(rates: Sequence[float]) -> float:
        found = expected_latency(plan, mixed_prompts(rates), interval=100).interval
        assert found is not None
        return found[1] - found[0]

    unlike, alike = width([0.9, 0.45] * 6), width([0.675] * 12)
    assert unlike > 3 * alike
    assert width([0.9, 0.45] * 24) == pytest.approx(unlike / 2, rel=0.3)


def test_intervals_are_over_prompts_not_over_repeats() -> None:
    factors = np.random.default_rng(0).gamma(4, 1 / 4, 8)

    def width(prompts: int, repeats: int) -> float:
        cells = itertools.product(("t", "t(d:4)"), range(1, repeats + 1), range(prompts))
        runs = [
            Run(plan, repeat, prompt, 10, 10 * factors[prompt % 8] * (0.5 if plan == "t" else 0.4), order=place)
            for place, (plan, repeat, prompt) in enumerate(cells)
        ]
        found = compare(
            runs, Predictions({"x": {}}, "x"), chosen="t(d:4)", autoregression="t", rng=np.random.default_rng(1)
        )
        low, high = found.plan("t(d:4)").measured.bounds or (0.0, 0.0)
        return high - low

    assert width(8, 20) == pytest.approx(width(8, 2), rel=0.1)
    assert width(32, 2) < 0.65 * width(8, 2)


def test_time_outside_the_model_is_in_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing a token takes 0.3 s here: the measured time has it, the log tells it from the passes."""
    clock = Clock(monkeypatch)
    models = {"t": clock.charge(tiny_model(name="t"), lambda _: 1.0)}

    def slow(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        clock.now += 0.3
        return scores

    output = generate("t", models, PROMPT, max_new_tokens=11, ignore_eos=True, processors=[slow])
    assert output.seconds_per_token == pytest.approx(1.3)
    assert output.counters.seconds["t"] / output.counters.passes["t"] == pytest.approx(1.0)
    passes = {("t", 1): 10}
    runs = [Run("t", 1, prompt, 10, output.seconds.decode, 10, passes, {("t", 1): 10.0}) for prompt in range(2)]
    found = compare(
        runs,
        Predictions({"x": {}}, "x"),
        chosen="t",
        autoregression="t",
        rng=np.random.default_rng(0),
        cost=lambda *_: 1.0,
    )
    assert found.plan("t").outside == pytest.approx(0.3 / 1.3)
    assert found.plan("t").measured.value == pytest.approx(1.3)


def small_workload(*texts: str) -> Workload:
    return Workload("small", tuple(Prompt(f"p{index}", text) for index, text in enumerate(texts)))


class Stopped(BaseException):
    """The user's Ctrl-C."""


def test_costs_of_another_dtype_are_not_reused(tmp_path: Path) -> None:
    """Neither by a resumed measurement nor by a profile: it loads its models as they were timed."""

    def stop(*_: object) -> None:
        raise Stopped

    def run(dtype: torch.dtype, **options: Any) -> Profile:  # noqa: ANN401 -- handed on
        models = {name: tiny_model(name=name, dtype=dtype) for name in ("t", "d")}
        work = small_workload("Say one.", "Say two.")
        setting = Setting(max_new_tokens=4)
        return measure("t", ["d"], work, models=models, journal=tmp_path / "j", setting=setting, **options)

    with pytest.raises(Stopped):
        run(torch.float64, progress=stop)
    with pytest.raises(ProfileError, match=r"models\.t = .*float64.*this call says .*float32"):
        run(torch.float32, resume=True)

    folder = str(save_tiny(tmp_path / "tiny"))
    curves = dict.fromkeys(("t", "d"), CostCurve.fixed(1.0))
    infos = {"t": ModelInfo(source=folder, dtype="float32"), "d": ModelInfo(source=folder, dtype="bfloat16")}
    loaded = load_models(Profile("t", curves, models=infos))
    assert {name: model.precision for name, model in loaded.items()} == {"t": "float32", "d": "bfloat16"}


def test_costs_of_another_batch_size_are_not_reused() -> None:
    alone = [CostSample(n, 8, (float(n),)) for n in (1, 2)]
    eight = [CostSample(n, 8, (5.0 * n,), batch=8) for n in (1, 2, 4)]
    curve = CostCurve.from_samples([*alone, *eight])
    assert curve.table(2) == pytest.approx([1.0, 2.0])
    with pytest.raises(PredictionError, match="1 to 2 new tokens"):
        curve(4)
    with pytest.raises(InvalidArgumentError, match="full grid"):
        CostCurve.from_samples(eight)


def test_acceptance_is_not_biased_by_confidence_stopping() -> None:
    """A drafter that is right where it is sure: positions at which it would have stopped count all the same."""
    rng = np.random.default_rng(5)
    count = 4000
    said, top = rng.integers(0, 50, count), rng.random(count)
    right = rng.random(count) < top
    traces = Traces(
        said,
        np.zeros(count, dtype=np.int64),
        np.arange(count),
        {"t": said, "d": np.where(right, said, -1)},
        top={"d": top},
        surprise={("d", "t"): np.where(right, 0.1, 5.0)},
    )
    law = traces.acceptance("d", "t", 4)
    assert right[top > 0.5].mean() > right.mean() + 0.2
    assert law.survival[1] == pytest.approx(right.mean())
    assert law.trials[0] == count
    assert replace(traces, top={}, surprise={}).acceptance("d", "t", 4) == law


@pytest.mark.parametrize("length", [1, 3, 8])
def test_acceptance_is_not_biased_by_the_draft_length(length: int) -> None:
    """Accepted over drafted falls with the length; the rate that predictions use does not."""
    models = scheduled_models({("d", "t"): 0.7}, seed=length)
    edge = generate(f"t(d:{length})", models, [0], max_new_tokens=2500).counters.edges["d", "t"]
    judged = [edge.drafts, *edge.accepted_at]
    survival = tuple(count / edge.drafts for count in judged)
    rate = Acceptance(survival).rate
    assert rate == pytest.approx(0.7, abs=4 * (0.7 * 0.3 / (edge.accepted + edge.drafts)) ** 0.5)
    assert Acceptance(tuple(0.7**m for m in range(length + 1))).rate == pytest.approx(0.7)
    assert length == 1 or edge.acceptance < 0.65


def test_always_100_per_cent_reports() -> None:
    """Full marks for the target's twin only: not for a stranger, and not where nothing was judged."""
    models = {"t": tiny_model(name="t"), "twin": tiny_model(name="twin"), "other": tiny_model(3, name="other")}
    for setting in (Setting(), Setting(temperature=0.8, top_p=0.9)):
        options = setting.model_dump(exclude={"max_new_tokens"})
        tokens = generate("t", models, PROMPT, max_new_tokens=120, ignore_eos=True, seed=0, **options).tokens
        traces = assemble([score_output(models, "t", PROMPT, tokens, setting=setting)])
        assert traces.acceptance("twin", "t", 4).rate == pytest.approx(1.0, abs=1e-5)
        assert traces.acceptance("other", "t", 4).rate < 0.5
    silent = generate("t(lookup:3)", {**models, LOOKUP: Model.of_lookup(Lookup(), models["t"])}, [9], max_new_tokens=2)
    edge = silent.counters.edges.get((LOOKUP, "t"))
    assert edge is None or (edge.drafted == 0 and np.isnan(edge.acceptance))
    assert Acceptance.from_joint(np.array([[1.0, 0.0], [0.0, 0.0]])).rate == 0.0  # it never proposed


def test_a_lookup_drafter_is_not_scored_on_what_it_has_seen() -> None:
    """Outputs without repetition: a table of them all knows each by heart, one without it knows nothing."""
    traces = []
    for index in range(3):
        start = 100 * index
        tokens = tuple(range(start + 10, start + 40))
        traces.append(PromptTrace(tuple(range(start, start + 10)), tokens, choice={"t": list(tokens)}))
    seen = assemble(traces, lookup=lambda _: Lookup(lookup_table(traces)))
    apart = assemble(traces, lookup=leave_one_out(traces))
    assert seen.acceptance(LOOKUP, "t", 4).rate > 0.9
    assert apart.acceptance(LOOKUP, "t", 4).rate == 0.0


# --- output differs from the target's -------------------------------------------------------------------------


@dataclass(slots=True)
class Scored:
    """A table model as the profiler sees it."""

    model: Any

    def opening(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def network_session(self) -> Any:  # noqa: ANN401 -- a mock
        return self.model.network_session()


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_p": 0.6}, {"top_k": 3}, {"repetition_penalty": 1.8}])
def test_draft_distribution_scored_is_the_one_sampled_from(options: dict[str, Any]) -> None:
    """The acceptance that a profile promises, along one sampled output, is the one that the runtime then has."""
    models: dict[str, Any] = {name: table_model(name, seed, vocab=7, spread=1.5) for seed, name in enumerate("ts")}
    options = {"temperature": 1.0, **options}
    output = generate("t(s:1)", models, [0, 1], max_new_tokens=700, seed=2, **options)
    setting = Setting(max_new_tokens=700, **options)
    trace = score_output({n: Scored(m) for n, m in models.items()}, "t", [0, 1], output.tokens, setting=setting)  # type: ignore[misc]
    overlap = np.array(trace.overlap["s\tt"])
    for index in range(0, 700, 50):
        prefix = [0, 1, *output.tokens[:index]]
        q, p = (warped(models[name], prefix, options) for name in "st")
        assert overlap[index] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
    verified = [event for event in output.events if event.kind == "verify" and event.drafted]
    starts = 1 + np.cumsum([0, *(event.accepted + 1 for event in verified[:-1])])
    accepted = sum(event.accepted for event in verified)
    promised = overlap[starts]
    assert len(verified) > 250
    assert accepted == pytest.approx(promised.sum(), abs=4 * np.sqrt((promised * (1 - promised)).sum()))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def test_rounding_flips_a_near_tie_and_a_fault_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that move with the size of a pass change an output at a near tie; a broken rule changes it elsewhere."""
    target, drafter = Shaky("t", 3), Shaky("s", 3)
    models: dict[str, Any] = {"t": target, "s": drafter}
    target.gap, drafter.gap = 0.05, 1.0

    def found() -> Mismatch:
        own, drafted = (generate(plan, models, [2], max_new_tokens=8).tokens for plan in ("t", "t(s:2)"))
        place = first_difference(own, drafted)
        tie = near_tie(target, [2, *own[:place]])  # type: ignore[arg-type]
        assert tie.near == (tie.gap <= 4 * tie.difference)
        return Mismatch("t(s:2)", 0, place, tie.gap, 4 * tie.difference)

    assert found().near_tie
    target.gap, drafter.gap = 3.0, -3.0  # nothing is near, and the drafter is wrong

    def accepts_all(
        self: rules.Greedy, logits: torch.Tensor, tokens: Sequence[int], laws: Sequence[Any], _: float = 1
    ) -> Any:  # noqa: ANN401
        best = self.sampling.scores(logits, tokens, len(tokens) - len(laws)).argmax(-1).tolist()
        return rules.Verdict(len(laws), best[-1], [None] * (len(laws) + 1))

    monkeypatch.setattr(rules.Greedy, "review", accepts_all)
    assert not found().near_tie


REPEATED: dict[str, Plan] = {
    "adaptive": Adaptive("t", Choice("m", 3), (("s", (None,)), ("m", (None, Choice("s", 1), Choice(LOOKUP, 2))))),
    "bild, paper": Bild("t", "s", 0.5, 1.0),
    "bild, reference": Bild("t", "s", 0.5, 1.0, semantics="reference"),
    "one network": parse_plan("t(exit:3)"),
}


@pytest.mark.parametrize("kind", REPEATED)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.2}])
def test_the_same_call_twice_gives_the_same_trace(kind: str, options: dict[str, Any]) -> None:
    """Also with another call between the two, and in sessions used before."""
    models = {**family(), "exit": Model.of(first_layers(family()["t"].network, 1), tiny_tokenizer(), name="exit")}
    plan = REPEATED[kind]
    sessions = {name: models[name].session() for name in plan.models}

    def trace(prompt: list[int], **more: Any) -> list[Any]:  # noqa: ANN401 -- handed on
        output = generate(plan, models, prompt, max_new_tokens=25, **options, **more)
        return [output.tokens, *(replace(event, seconds=0.0) for event in output.events)]

    first = trace(PROMPT)
    trace([9, 9, 9], sessions=sessions)
    assert trace(PROMPT) == first
    assert trace(PROMPT, sessions=sessions) == first


# --- caches ---------------------------------------------------------------------------------------------------


def uncroppable(kind: str) -> transformers.PreTrainedModel:
    """Return a tiny network that keeps a state of the named kind."""
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {**size, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    config = {
        "convolution": lambda: transformers.Lfm2Config(**heads, layer_types=["conv", "full_attention"]),
        "recurrent": lambda: transformers.FalconMambaConfig(**size, state_size=4),
        "recurrent beside attention": lambda: transformers.FalconH1Config(**heads, **mamba),
        "linear attention": lambda: transformers.Qwen3NextConfig(
            **heads, **linear, head_dim=8, layer_types=["linear_attention", "full_attention"]
        ),
        "a class of its own": lambda: transformers.xLSTMConfig(**size, num_heads=4),
        "a dict": lambda: transformers.XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=4, causal=True),
    }[kind]()
    return transformers.AutoModelForCausalLM.from_config(config).eval()


UNCROPPABLE = (
    "convolution",
    "recurrent",
    "recurrent beside attention",
    "linear attention",
    "a class of its own",
    "a dict",
)


@pytest.mark.parametrize("kind", UNCROPPABLE)
def test_a_cache_that_cannot_be_cropped_is_refused_by_name(kind: str) -> None:
    network = uncroppable(kind)
    name = type(network).__name__
    with pytest.raises(
        CacheError, match=rf"^mine: expected a cache whose last tokens can be dropped; {name}: "
    ) as said:
        Model.of(network, None, name="mine")
    assert "\n" not in str(said.value)


def test_a_static_cache_is_not_used() -> None:
    """Whatever cache a model's settings ask for, sessions keep one of their own, which grows and is cropped."""
    network = tiny_network()
    network.generation_config.cache_implementation = "static"
    models = {"t": Model.of(network, tiny_tokenizer(), name="t"), "s": family()["s"]}
    plain = generate("t", family(), PROMPT, max_new_tokens=30).tokens
    assert generate("t(s:4)", models, PROMPT, max_new_tokens=30).tokens == plain


def test_angles_that_change_with_the_length_end_the_positions() -> None:
    """Long rope turns all keys by other angles behind a length; cached ones would keep the old."""
    config = transformers.Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=256,
        original_max_position_embeddings=16,
        initializer_range=0.3,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
        },
    )
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).to(torch.float64).eval()
    models = {"t": Model.of(network, None, name="t")}
    assert len(generate("t", models, [5, 6, 7], max_new_tokens=13, ignore_eos=True).tokens) == 13
    with pytest.raises(InvalidArgumentError, match="within the 16 positions of t"):
        generate("t", models, [5, 6, 7], max_new_tokens=14)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("prompt", [[9], list(range(70, 70 + 2 * WINDOW))])
def test_crop_after_full_acceptance_leaves_exactly_what_was_fed(architecture: str, prompt: list[int]) -> None:
    """The target drafts for itself: all is accepted, and no pass feeds a token twice or leaves one out."""
    models = {name: tiny_model(0, name=name, architecture=architecture) for name in "ts"}
    output = generate("t(s:4)", models, prompt, max_new_tokens=26, ignore_eos=True)
    assert output.tokens == generate("t", models, prompt, max_new_tokens=26, ignore_eos=True).tokens
    passes = [(event.model, event.new_tokens, event.context) for event in output.events if event.kind == "pass"]
    start = len(prompt)
    rounds = []
    for index in range(5):
        at = start + 5 * index  # tokens before the one that the last round gave
        first = ("s", 1, at) if index == 0 else ("s", 2, at - 1)  # from the second round on it lacks its own last too
        rounds += [first, *(("s", 1, at + ahead) for ahead in (1, 2, 3)), ("t", 5, at)]
    assert passes == rounds


# --- vocabularies ---------------------------------------------------------------------------------------------


def test_embedding_rows_padded_differently_are_never_profiled_as_tokens() -> None:
    """The drafter's padded rows win every argmax and hold all probability, unless they are cut off."""
    models = {
        "t": tiny_model(name="t", vocab=VOCAB + 5),
        "s": tiny_model(name="s", vocab=VOCAB + 13, architecture="qwen2"),
    }
    models["s"].network.lm_head.weight.data[VOCAB:] *= 100
    for setting in (Setting(), Setting(temperature=1.0, top_k=4)):
        trace = score_output(models, "t", PROMPT, [80, 81, 82, 83], setting=setting)
        assert max(trace.choice["s"]) < VOCAB
        assert all(np.isfinite(trace.surprise["s\tt"]))
        assert all(0 <= value <= 1 for values in trace.overlap.values() for value in values)


# --- lengths and memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [64, 120])
def test_a_model_with_few_positions_profiles_and_solves(positions: int, tmp_path: Path) -> None:
    """What can be profiled can be predicted: costs are measured as far along as outputs come."""
    models = {"t": tiny_model(name="t"), "s": tiny_model(name="s", noise=0.03, positions=positions)}
    long, short = "x" * (positions - 60), "y"  # the chat template adds some 30 tokens
    work = small_workload(long, long, short, short)
    setting = Setting(max_new_tokens=20)
    found = measure("t", ["s"], work, models=models, journal=tmp_path / "j", setting=setting, repeats=1)
    assert found.traces is not None
    assert positions - 24 < int(found.traces.context.max()) < positions
    plan = parse_plan("t(s:2)")
    assert replay(plan, found).seconds_per_token > 0
    assert expected_latency(plan, found, tokens=19).seconds_per_token > 0
    assert solve(found, interval=20).seconds_per_token > 0
    beyond = parse_plan("t(s:41)")
    with pytest.raises(PredictionError):
        expected_latency(beyond, found)


def test_contexts_too_short_for_the_workload_are_refused_before_measuring(tmp_path: Path) -> None:
    models = {"t": tiny_model(name="t"), "s": tiny_model(name="s")}
    work = small_workload("x" * 100, "y" * 100)
    with pytest.raises(
        InvalidArgumentError, match=r"expected contexts up to \d+ tokens, the longest prompt .*; got 64"
    ):
        measure("t", ["s"], work, models=models, journal=tmp_path / "j", contexts=(32, 64))
    assert not (tmp_path / "j").exists()


def test_out_of_memory_of_the_second_model_is_said_before_the_first_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (save_tiny(tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    size = (one / "model.safetensors").stat().st_size
    begun: list[str] = []
    original = loading.AutoModelForCausalLM.from_pretrained

    def noted(folder: Path, **options: Any) -> Any:  # noqa: ANN401 -- handed on
        begun.append(folder.name)
        return original(folder, **options)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", noted)
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5 * size))
    with pytest.raises(ModelError, match=r"free memory on cpu for .*one and .*two; got"):
        load_models({"t": str(one), "s": str(two)})
    assert not begun
    assert list(load_models({"t": str(one), "s": f"skip:0@{one}"})) == ["t", "s"]  # recipes share what they start from


# --- metrics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["t(d:3)", "t(d:1)", "t"])
def test_emitted_is_accepted_plus_passes_for_every_reader(text: str) -> None:
    plan = parse_plan(text)
    profile = Profile.from_rates("t", {"t": 1.0, "d": 0.1}, {("d", "t"): 0.6})
    traced = Profile("t", profile.costs, traces=agreeing(120, every=3))
    ran: Counters = generate(plan, scheduled_models({("d", "t"): 0.6}), [0], max_new_tokens=200).counters
    assert ran.held["t"] - ran.discarded["t"] == 200
    assert ran.held["t"] == 1 + ran.passes["t"] + sum(edge.accepted for edge in ran.edges.values())
    for run in (simulate(plan, profile, tokens=3000), replay(plan, traced)):
        assert run.tokens + run.discarded["t"] == run.rounds + sum(run.accepted.values())
        assert sum(size * count for size, count in enumerate(run.tokens_histogram)) == run.tokens
    estimate = expected_latency(plan, profile)
    assert pytest.approx(1 / estimate.tokens_per_pass + sum(edge.accepted for edge in estimate.edges)) == 1


def test_a_rate_above_1_and_a_rising_curve_are_refused() -> None:
    for rate in (1.0001, -0.1, float("nan")):
        with pytest.raises(InvalidArgumentError, match="rate between 0 and 1"):
            Acceptance.from_rate(rate)
    for curve in ((1.0, 0.5, 0.6), (1.0, 1.2), (0.9, 0.5), (1.0, float("nan"))):
        with pytest.raises(InvalidArgumentError, match="survival curve"):
            Acceptance(curve)
    counts = generate("t(s:4)", family(), PROMPT, max_new_tokens=100, ignore_eos=True).counters.edges["s", "t"]
    assert list(counts.accepted_at) == sorted(counts.accepted_at, reverse=True)
    assert 0 < counts.acceptance < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlaps_of_equal_laws_stay_at_1(dtype: torch.dtype) -> None:
    """Sums of rounded probabilities may exceed 1 by a little, and rates never do."""
    models = {name: tiny_model(0, name=name, dtype=dtype) for name in ("t", "s")}
    tokens = [5 + index for index in range(40)]
    trace = score_output(models, "t", PROMPT, tokens, setting=Setting(temperature=1.3))
    assert max(*trace.overlap["s\tt"], *trace.ratio["s\tt"]) <= 1.0
    law = assemble([trace]).acceptance("s", "t", 8)
    assert 0.999 < law.survival[1] <= 1.0


# --- a new measurement that is asked for is never answered with an old one --------------------------------------


def test_force_stopped_before_its_first_line_is_what_resume_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_stack(tmp_path)
    out = root / "profile.json"
    out.write_text("the old one")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def begin(*_: object, **options: Any) -> None:  # noqa: ANN401 -- whatever it is called with
        assert options["resume"]
        raise ProfileError("measuring")

    monkeypatch.setattr("hsdopt.runtime.load_models", stop)
    call(*profile_arguments(root, out, "--force"), code=130)
    assert "is there already" in refused(*profile_arguments(root, out))
    monkeypatch.setattr("hsdopt.runtime.load_models", lambda *_, **__: {})
    monkeypatch.setattr("hsdopt.profiling.profile", begin)
    assert refused(*profile_arguments(root, out, "--resume")) == "hsdopt: measuring"
    assert out.read_text() == "the old one"


@lru_cache
def names_in(path: Path) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_kind_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    named = {test for tests in KINDS.values() for test in tests}
    for test in sorted(named):
        file, _, name = test.partition("::")
        assert re.fullmatch(r"test_\w+\.py", file)
        assert name in names_in(here / file), test
    assert all(KINDS.values())
    unmapped = names_in(Path(__file__)) - {test.partition("::")[2] for test in named}
    assert unmapped == {
        "test_every_kind_names_tests_that_exist",
        "test_force_stopped_before_its_first_line_is_what_resume_continues",
    }
