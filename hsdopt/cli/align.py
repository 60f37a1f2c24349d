"""`hsdopt align`: train drafters on what the target writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hsdopt.cli.align_request import Folder, Request
from hsdopt.cli.align_train import train_and_save
from hsdopt.cli.common import absolute, new_table, output, print_json, require_extra, whole_numbers
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hsdopt.profiling import Workload

_TOGETHER = 64
"""Prompts that the target continues together."""
_TOP = 16
"""Probabilities kept per token for soft labels."""

Target = Annotated[str, typer.Option("--target", help="The model to draft for.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder that the drafter is written to.")]
Prompts = Annotated[str, typer.Option("--prompts", help="training, another built-in set, or a file of prompts.")]
Small = Annotated[str | None, typer.Option("--small", help="A smaller model to start from; the target if not given.")]
Layers = Annotated[
    int | None, typer.Option("--layers", min=1, help="Keep so many layers: those that acceptance needs most.")
]
Exits = Annotated[str | None, typer.Option("--exits", help="Train exits after so many layers, such as 10,20.")]
Freeze = Annotated[bool, typer.Option("--freeze-target", help="With --exits: train only what the exits own.")]
Own = Annotated[int, typer.Option("--own-layers", min=1, help="With --freeze-target: layers that each exit owns.")]
Head = Annotated[
    int | None, typer.Option("--head-tokens", min=1, help="Propose only so many tokens, the most frequent ones.")
]
Embeddings = Annotated[
    bool | None,
    typer.Option(
        "--train-embeddings/--freeze-embeddings", help="Train embeddings and head; frozen unless --small is whole."
    ),
]
Soft = Annotated[float, typer.Option("--soft", min=0.0, help="Weight of the target's distribution as soft labels.")]
Labels = Annotated[str, typer.Option("--labels", help="argmax, or outputs: in sampled outputs they differ.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Outputs per prompt; the first one is greedy.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Of the sampled outputs.")]
Spans = Annotated[int, typer.Option("--spans", min=0, help="Random spans per prompt that the target continues too.")]
OwnPrompts = Annotated[int, typer.Option("--own-prompts", min=0, help="More prompts, written by the target itself.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens per output.")]
Count = Annotated[int | None, typer.Option("--max-prompts", min=2, help="Use at most this many prompts.")]
Data = Annotated[
    Path | None, typer.Option("--calibration", help="File that keeps the target's outputs, for other drafters to use.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps of training at most.")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="Time for training, in place of --steps.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Sequences per step.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="At its highest.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Steps until then.")]
Every = Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between looks at held-out prompts.")]
Patience = Annotated[int, typer.Option("--patience", min=1, help="Looks without a new best before it stops.")]
Holdout = Annotated[float, typer.Option("--holdout", help="Share of prompts held out.")]
Group = Annotated[int, typer.Option("--drop-group", min=1, help="Layers dropped between two rounds of choice.")]
ChoiceTokens = Annotated[int, typer.Option("--choice-tokens", min=1, help="Target tokens that layers are chosen on.")]
Compact = Annotated[
    bool, typer.Option("--compact", help="Do not store the target's own tensors again; only hsdopt can load it then.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of samples, order and held-out prompts.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted alignment.")]
Force = Annotated[bool, typer.Option("--force", help="Start afresh, and replace what is at -o.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def align(
    target: Target,
    output_path: Out,
    prompts: Prompts = "training",
    small: Small = None,
    layers: Layers = None,
    exits: Exits = None,
    freeze_target: Freeze = False,
    own_layers: Own = 1,
    head_tokens: Head = None,
    train_embeddings: Embeddings = None,
    soft: Soft = 0.0,
    labels: Labels = "argmax",
    samples: Samples = 1,
    temperature: Temperature = 0.8,
    spans: Spans = 0,
    own_prompts: OwnPrompts = 0,
    max_new_tokens: NewTokens = 64,
    max_prompts: Count = None,
    calibration: Data = None,
    steps: Steps = 1000,
    minutes: Minutes = None,
    batch: BatchSize = 8,
    learning_rate: Rate = 5e-4,
    warmup: Warmup = 20,
    evaluate_every: Every = 50,
    patience: Patience = 10,
    holdout: Holdout = 0.15,
    drop_group: Group = 1,
    choice_tokens: ChoiceTokens = 512,
    compact: Compact = False,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
    force: Force = False,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Train a drafter on what the target writes, so that the target accepts more of what it drafts.

    It starts from a given smaller model (--small), from a copy with fewer layers (--layers), or from exits of the
    target (--exits). Checkpoints are written as it goes: stopped in the middle, the same command with --resume
    continues, with the same result.
    """
    with require_extra("runtime"):
        from hsdopt.runtime.alignment import Recipe
        from hsdopt.runtime.calibration import Calibration
    recipe = Recipe(
        steps=steps,
        minutes=minutes,
        batch=batch,
        learning_rate=learning_rate,
        warmup=warmup,
        soft=soft,
        labels=_labels(labels),
        evaluate_every=evaluate_every,
        patience=patience,
        seed=seed,
    )
    top = _TOP if soft else 0
    request = Request(
        target=absolute(target),
        small=None if small is None else absolute(small),
        layers=layers,
        exits=whole_numbers(exits, "exits"),
        own_layers=own_layers if freeze_target else None,
        head_tokens=head_tokens,
        train_embeddings=train_embeddings,
        drop_group=drop_group,
        choice_tokens=choice_tokens,
        holdout=holdout,
        recipe=recipe,
        calibration=Calibration(
            samples, temperature, spans, own_prompts, max_new_tokens, batch=_TOGETHER, top=top, seed=seed
        ),
    )
    place = Folder(output_path, calibration, resume=resume, force=force)
    place.clear()
    loading = {"device": device, "threads": threads, "trust_remote_code": trust_remote_code}
    _show(train_and_save(request, place, _workload(prompts, max_prompts), loading, compact=compact), as_json=as_json)


def _labels(text: str) -> Literal["argmax", "outputs"]:
    if text == "argmax":
        return "argmax"
    if text == "outputs":
        return "outputs"
    raise InvalidArgumentError(f"expected argmax or outputs as --labels; got {text!r}")


def _workload(prompts: str, count: int | None) -> Workload:
    with require_extra("runtime"):
        from hsdopt.profiling import load_workload
    workload = load_workload(prompts)
    return workload if count is None else workload.take(count)


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print what was made, and how its acceptance changed."""
    if as_json:
        print_json(result)
        return
    table = new_table("drafter", "before", "after", "95 % interval", "places")
    for row in result["drafters"]:
        low, high = row["after"]["interval"]
        rates = (f"{row[when]['acceptance']:.3f}" for when in ("before", "after"))
        table.add_row(row["source"], *rates, f"{low:.3f} to {high:.3f}", str(row["after"]["places"]))
    typer.echo(
        f"{result['folder']}: {result['steps']} steps, {result['tokens']} tokens, {result['seconds']:.0f} s;"
        " acceptance on held-out prompts"
    )
    output().print(table)
