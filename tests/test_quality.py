"""Quality of lossy decoding: scores by hand, judgements on tiny models, and `hsdopt quality` as a whole."""

from __future__ import annotations

import json
import math
import signal
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from stack import call, kill_midway, make_stack, profile_arguments, refused
from tiny import EOS, tiny_model
from traced import traced_profile

from hsdopt.errors import InvalidArgumentError, ModelError, PlanError, PredictionError
from hsdopt.latency import expected_latency
from hsdopt.plan import Bild, parse_plan
from hsdopt.plots import quality_frontier
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling.quality import Judge, Point, rejection_plans, rouge_l, score, threshold_grid, undominated, verdict
from hsdopt.profiling.validate import MeasuredRun
from hsdopt.runtime import generate
from hsdopt.runtime.model import Model

DATA = Path(__file__).parent / "data"
PAIRS = json.loads((DATA / "rouge_l.json").read_text())["pairs"]
GRID = ("--small", "small", "--fallback", "0.05,0.3", "--rollback", "3,inf")
words = st.lists(st.sampled_from("abc"), max_size=6)


@pytest.mark.parametrize("pair", PAIRS, ids=[pair["output"][:12] for pair in PAIRS])
def test_rouge_l_is_the_libraries(pair: dict[str, str | float]) -> None:
    assert rouge_l(str(pair["output"]), str(pair["reference"])) == pytest.approx(pair["f"], abs=1e-12)


def longest_common(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence, by trying all of them."""
    for size in range(min(len(one), len(other)), 0, -1):
        if set(combinations(one, size)) & set(combinations(other, size)):
            return size
    return 0


@given(words, words)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_rouge_l_counts_the_longest_common_subsequence(one: list[str], other: list[str]) -> None:
    total = len(one) + len(other)
    expected = 2 * longest_common(one, other) / total if one and other else float(one == other)
    assert rouge_l(" ".join(one), " ".join(other)) == pytest.approx(expected)


def test_rouge_l_reads_every_script() -> None:
    assert rouge_l("Le train part à huit heures", "le train PART à dix heures") == pytest.approx(5 / 6)
    assert rouge_l("поезд ушёл", "поезд пришёл") == pytest.approx(1 / 2)


def test_bleu_by_hand() -> None:
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples and 1 of 3 fours are in the reference, which is as long
    found = score(["the cat sat on the mat"], ["the cat sat on a mat"])
    assert found.bleu == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    short = score(["the cat sat on"], ["the cat sat on the mat"])  # all is right, and 4 words stand for 6
    assert short.bleu == pytest.approx(100 * math.exp(1 - 6 / 4))
    # counts are pooled over the corpus: 9 of 10, 6 of 8, 4 of 6 and 2 of 4
    both = score(["the cat sat on the mat", "dogs bark at night"], ["the cat sat on a mat", "dogs bark at night"])
    assert both.bleu == pytest.approx(100 * (9 / 10 * 6 / 8 * 4 / 6 * 2 / 4) ** 0.25)
    assert both.exact == 0.5
    assert both.agreement is None


@pytest.mark.parametrize("text", ["yes", "one two", "", "a b c d e f"])
def test_equal_texts_are_perfect_however_short(text: str) -> None:
    found = score([text], [text])
    assert (found.bleu, found.rouge_l, found.exact) == (pytest.approx(100.0 if text else 0.0), 100.0, 1.0)


def test_tokens_are_compared_place_by_place() -> None:
    same, late, longer = ((1, 2, 3), (1, 2, 3)), ((1, 2, 9, 4), (1, 2, 3, 4)), ((1, 2, 3, 4), (1, 2))
    found = score(["a"] * 3, ["a"] * 3, tokens=[same, late, longer])
    assert found.agreement == pytest.approx((3 + 3 + 2) / (3 + 4 + 4))
    assert found.first_difference == pytest.approx((3 + 2 + 2) / 3)


@pytest.mark.parametrize(("outputs", "references"), [([], []), (["a"], ["a", "b"]), (["a"], [])])
def test_scores_need_pairs(outputs: list[str], references: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="as many references as outputs"):
        score(outputs, references)


def run_of(plan: str, output: tuple[int, ...], *, prompt: int = 0, passes: int = 1) -> MeasuredRun:
    return MeasuredRun(
        plan=plan,
        prompt=prompt,
        repeat=0,
        order=0,
        output=output,
        tokens=len(output) - 1,
        seconds=1.0,
        prefill_seconds=0.1,
        tokens_per_pass=1.0,
        passes=(("tiny", 1, passes, 1.0),),
    )


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny_model(0)


def test_outputs_end_at_their_first_end_of_text(target: Model) -> None:
    assert target.eos == {EOS}
    own, other = (70, 71, EOS, 72, 73, 74), (70, 71, EOS, 90, 91, 92)
    judge = Judge(target, [run_of("tiny", own)], [(80, 81)], {0: "unlike"}, Setting())
    found = judge([run_of("x", other)])
    assert (found.own.exact, found.own.agreement, found.own.first_difference) == (1.0, 1.0, 3.0)
    assert found.reference is not None
    assert found.reference.exact == 0.0
    assert found.drafted_share == pytest.approx(1 - 1 / 5)


def test_only_prompts_with_a_reference_count_for_it(target: Model) -> None:
    own = [run_of("tiny", (70, 71), prompt=prompt) for prompt in range(2)]
    text = target.tokenizer.decode([70, 71])
    found = Judge(target, own, [(80,), (81,)], {1: text}, Setting())(own)
    assert found.reference is not None
    assert found.reference.exact == 1.0
    assert Judge(target, own, [(80,), (81,)], {}, Setting())(own).reference is None


def test_deviations_are_the_tokens_that_the_target_would_not_write(target: Model) -> None:
    small = tiny_model(0, name="small", noise=0.06)
    models, prompt = {"tiny": target, "small": small}, [70, 80, 90]
    plans = ("tiny", "tiny(small:3)", "bild(tiny, small, fallback=0.02, rollback=inf)")
    outputs = {plan: tuple(generate(plan, models, prompt, max_new_tokens=20, ignore_eos=True).tokens) for plan in plans}
    judge = Judge(target, [run_of("tiny", outputs["tiny"])], [prompt], {}, Setting())
    found = {plan: judge([run_of(plan, output)]) for plan, output in outputs.items()}
    assert found["tiny"].deviation == found["tiny(small:3)"].deviation == 0.0
    assert found["tiny(small:3)"].own.exact == 1.0
    lossy = outputs[plans[2]]
    end = next((place for place, token in enumerate(lossy, 1) if token == EOS), len(lossy))
    strange = sum(
        generate("tiny", models, [*prompt, *lossy[:place]], max_new_tokens=1).tokens[0] != lossy[place]
        for place in range(end)
    )
    assert strange > 0
    assert found[plans[2]].deviation == pytest.approx(strange / end)


def test_nothing_deviates_from_chance(target: Model) -> None:
    own = [run_of("tiny", (70, 71))]
    assert Judge(target, own, [(80,)], {}, Setting(temperature=1.0, top_p=0.8))(own).deviation is None
    with pytest.raises(ModelError, match="expected a tokenizer with tiny"):
        Judge(tiny_model(0, vocab=40), own, [(80,)], {}, Setting())


def test_grids_hold_every_pair() -> None:
    grid = threshold_grid("t", "s", (0.2, 0.5), (1, math.inf), max_draft=4, semantics="reference")
    assert {(plan.fallback, plan.rollback) for plan in grid} == {(f, r) for f in (0.2, 0.5) for r in (1, math.inf)}
    assert {(plan.max_draft, plan.semantics) for plan in grid} == {(4, "reference")}
    with pytest.raises(PlanError, match="fallback between 0 and 1"):
        threshold_grid("t", "s", (1.5,), (1,))


@pytest.mark.parametrize("small", ["int4", "skip"])
def test_rejection_sampling_runs_at_its_best_length(small: str) -> None:
    profile = traced_profile()
    plans = [parse_plan(f"big({small}:{length})") for length in range(1, 17)]
    best = min(plans, key=lambda plan: expected_latency(plan, profile).seconds_per_token)
    assert best in rejection_plans(profile, small)
    assert 1 < len(rejection_plans(profile, small)) <= 3
    blind = Profile.from_rates("big", {"big": 1.0, "small": 0.1}, {})
    with pytest.raises(PredictionError, match="acceptance of small under big"):
        rejection_plans(blind, "small")


points = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8).map(
    lambda pairs: [Point(f"p{number}", float(time), float(good)) for number, (time, good) in enumerate(pairs)]
)


@given(points)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_the_frontier_is_what_nothing_beats(all_: list[Point]) -> None:
    def beaten(point: Point) -> bool:
        pairs = ((other.time <= point.time, other.quality >= point.quality, other) for other in all_)
        return any(
            fast and good and (other.time, other.quality) != (point.time, point.quality) for fast, good, other in pairs
        )

    values = {(point.time, point.quality) for point in all_ if not beaten(point)}
    kept = undominated(all_)
    assert {(point.time, point.quality) for point in kept} == values
    assert len(kept) == len(values)


@given(points, points, st.integers(0, 6))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_verdicts_by_trying_every_point(lossy: list[Point], lossless: list[Point], limit: int) -> None:
    found = verdict(float(limit), lossless, lossy)
    good = [point for point in lossy if point.quality >= limit]
    assert found.kept == bool(good)
    if found.lossless is not None:
        fast = [point for point in lossy if point.time <= found.lossless.time]
        assert found.lossless.time == min(point.time for point in lossless)
        assert (found.equal_latency is None) == (not fast)
        assert all(point.quality <= found.equal_latency.quality for point in fast if found.equal_latency)
    if good:
        assert found.equal_quality in good
        assert found.equal_quality.time == min(point.time for point in good)
    elif lossy:
        assert found.equal_quality.quality == max(point.quality for point in lossy)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_stack(tmp_path_factory.mktemp("stack"))
    texts = [{"prompt": f"Say number {index} twice.", "reference": f"{index} {index}"} for index in range(4)]
    del texts[0]["reference"], texts[3]["reference"]
    (root / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    call(*profile_arguments(root, root / "profile.json"))
    return root / "profile.json"


@pytest.fixture(scope="module")
def finished(profile: Path) -> Path:
    folder = profile.parent / "quality"
    extremes = ("bild(big, small, fallback=1, rollback=0)", "bild(big, small, fallback=0, rollback=inf)")
    lenient = "big(small:3(cut:1, lenience=4))"
    plans = [part for plan in (*extremes, lenient) for part in ("--plan", plan)]
    call("quality", profile, *GRID, *plans, "-o", folder)
    return folder


def test_the_report_holds_every_plan(finished: Path) -> None:
    report = json.loads((finished / "quality.json").read_text())
    rows = {row["plan"]: row for row in report["plans"]}
    grid = {plan.label for plan in threshold_grid("big", "small", (0.05, 0.3), (3, math.inf), max_draft=10)}
    assert grid | {"big", "big(small:3(cut:1, lenience=4))"} < rows.keys()
    assert (report["measure"], report["against"], report["prompts"]) == ("rouge-l", "own", 2)
    assert [row["time"] for row in report["plans"]] == sorted(row["time"] for row in rows.values())
    for row in rows.values():
        assert row["time"] == pytest.approx(row["seconds_per_token"] / rows["big"]["seconds_per_token"])
        assert row["time_interval"][0] <= row["time"] <= row["time_interval"][1]
        if row["lossless"]:
            assert (row["own"]["exact"], row["deviation"], row["quality"]) == (1.0, 0.0, 100.0)
    assert rows["big"]["drafted_share"] == 0.0
    assert {path.name for path in finished.iterdir()} == {
        "quality.json", "frontier.csv", "frontier.png", "frontier.svg",
    }  # fmt: skip


def test_extreme_thresholds_are_one_model_or_the_other(finished: Path, profile: Path) -> None:
    rows = {row["plan"]: row for row in json.loads((finished / "quality.json").read_text())["plans"]}
    large, small = rows["bild(big, small, fallback=1, rollback=0)"], rows["bild(big, small, fallback=0, rollback=inf)"]
    assert (large["own"]["exact"], large["drafted_share"], large["deviation"]) == (1.0, 0.0, 0.0)
    assert small["drafted_share"] == pytest.approx(1 - 1 / 11)
    assert small["deviation"] > 0
    assert large["predicted"]["deviation"] == 0.0
    traces = Profile.load(profile).traces
    assert traces is not None
    disagree = float((traces.choice["small"] != traces.choice["big"]).mean())
    assert small["predicted"]["deviation"] == pytest.approx(disagree, abs=0.1)
    assert small["predicted"]["closed_form"] < large["predicted"]["closed_form"]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_whole(profile: Path, finished: Path, columns: int) -> None:
    arguments = ("--resume", "--predicted", "-o", finished)
    extremes = ("bild(big, small, fallback=1, rollback=0)", "bild(big, small, fallback=0, rollback=inf)")
    plans = [part for plan in (*extremes, "big(small:3(cut:1, lenience=4))") for part in ("--plan", plan)]
    done = call("quality", profile, *GRID, *plans, *arguments, COLUMNS=str(columns))
    assert "complete already" in done.stderr
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= columns for line in lines[:-1])
    said = " ".join(" ".join(lines).split())
    assert "ref.: ROUGE-L against references, for prompts that have one (1 of 2)" in said
    assert "so few prompts (2) show little about quality" in said
    assert "equal latency: the best lossless plan, big" in said
    assert "is the fastest of those that lose nothing (ROUGE-L 100.0, lossless 100.0): speed-up " in said


def test_finished_results_are_kept(profile: Path, finished: Path) -> None:
    before = (finished / "quality.json").read_bytes()
    assert "replace it with --force" in refused("quality", profile, *GRID, "-o", finished)
    other = refused("quality", profile, *GRID, "--resume", "-o", finished)
    assert "is complete, but with plans = [" in other
    assert "not both" in refused("quality", profile, *GRID, "--resume", "--force", "-o", finished, "--seed", "1")
    assert (finished / "quality.json").read_bytes() == before
    assert not (finished / "runs.partial").exists()


def test_killed_and_resumed_keeps_every_run(profile: Path, tmp_path: Path) -> None:
    one = ("--small", "small", "--fallback", "0.3", "--rollback", "3")
    arguments = ["quality", str(profile), *one, "--repeats", "4", "-o", str(tmp_path)]
    journal = tmp_path / "runs.partial"
    assert kill_midway(arguments, journal, lines=3) == -signal.SIGKILL
    kept = journal.read_bytes().count(b"\n") - 1
    assert kept > 0
    assert "add --resume" in refused(*arguments)
    report = json.loads(call(*arguments, "--resume", "--json").stdout)
    assert len(report["plans"]) == len(report["provenance"]["plans"])
    assert not journal.exists()


def test_sampled_outputs_are_held_against_other_draws_and_against_references(profile: Path, tmp_path: Path) -> None:
    sampling = ("--temperature", "1", "--top-p", "0.8", "--measure", "bleu")
    done = call("quality", profile, *GRID, *sampling, "-o", tmp_path / "a", "--json")
    report = json.loads(done.stdout)
    assert "nothing is predicted" in done.stderr
    assert report["provenance"]["setting"]["top_p"] == 0.8
    assert (report["sampled"], report["against"]) == (True, "own")  # one of two prompts has a reference
    drawn = [row["own"]["bleu"] for row in report["plans"] if row["lossless"] and row["plan"] != "big"]
    assert report["verdicts"]["own"]["limit"] == min(drawn) < 100
    alone = next(row for row in report["plans"] if row["plan"] == "big")
    assert report["verdicts"]["reference"]["limit"] == alone["reference"]["bleu"]
    for row in report["plans"]:
        assert row["deviation"] is None
        assert row["quality"] == (None if row is alone else row["own"]["bleu"])
        assert set(row["predicted"].values()) == {None}
    assert (tmp_path / "a" / "frontier.png").exists()
    told = profile.parent / "told.jsonl"
    told.write_text(
        "".join(json.dumps({"prompt": text, "reference": text}) + "\n" for text in ("One.", "Two.", "Three."))
    )
    done = call("quality", profile, *GRID, *sampling, "--prompts", told, "-o", tmp_path / "b")
    assert "drawn by the target's law too, reach BLEU " in " ".join(done.stdout.split())
    report = json.loads((tmp_path / "b" / "quality.json").read_text())
    assert report["against"] == "reference"
    assert all(row["quality"] == row["reference"]["bleu"] for row in report["plans"])


WRONG = (
    (("--small", "lookup"), "--small to be one of small, cut; got lookup"),
    (("--fallback", "0.2;0.4"), "--fallback as numbers with commas, such as 0.4,0.6; got '0.2;0.4'"),
    (("--fallback", "1.2"), "fallback between 0 and 1; got 1.2"),
    (("--rollback", "-1"), "rollback of at least 0"),
    (("--rollback", "nan"), "rollback of at least 0"),
    (("--semantics", "mine"), "--semantics to be one of 'paper', 'reference'; got 'mine'"),
    (("--measure", "meteor"), "--measure to be one of 'rouge-l', 'bleu'; got 'meteor'"),
    (("--plan", "small(cut:2)"), "plans that end in the target big; got small(cut:2)"),
    (("--plan", "big(other:2)"), "one of the profiled models (small, cut, lookup, big); got other"),
    (("--top-p", "0"), "--top-p above 0 and at most 1; got 0"),
    (("--temperature", "inf"), "finite temperature"),
    (("--prompts", "nowhere.jsonl"), "which does not exist"),
)


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_bad_input_is_one_line(profile: Path, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    assert said in refused("quality", profile, *options, "-o", tmp_path)
    assert not list(tmp_path.iterdir())


def frontier_report(count: int) -> dict[str, object]:
    """Return a report of two small models with `count` settings each, whose points crowd together."""

    def row(small: str | None, number: int) -> dict[str, object]:
        time, quality = 0.8 + 0.01 * number, 90.0 + 0.2 * number
        return {
            "plan": f"{small}{number}", "family": "bild" if small else "autoregression", "small": small,
            "fallback": 0.1 * number, "rollback": "inf" if number % 2 else 3.0, "time": time,
            "time_interval": (0.97 * time, 1.03 * time) if number % 3 else None,
            "quality": quality, "undominated": True,
        }  # fmt: skip

    rows = [row(None, 20), *(row(small, number) for small in ("one", "two") for number in range(count))]
    return {"plans": rows, "target": "big", "against": "own", "measure": "rouge-l", "sampled": False}


@pytest.mark.parametrize("count", [0, 1, 4, 12])
def test_labels_of_the_frontier_are_apart(count: int) -> None:
    axes = quality_frontier(frontier_report(count))
    labels = [text for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in labels]
    assert min(count, 1) <= len(labels) <= 2 * count
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)
    plt.close("all")


def test_a_frontier_needs_a_quality() -> None:
    report = frontier_report(0)
    report["plans"][0]["quality"] = None
    with pytest.raises(InvalidArgumentError, match="whose quality is known"):
        quality_frontier(report)
    assert Bild("a", "b").label  # what the figure's rows are named after
