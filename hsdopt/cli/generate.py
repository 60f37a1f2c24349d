"""`hsdopt generate`: text from any plan, as it is written."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hsdopt.cli.common import (
    aliases,
    load_plan,
    load_profile,
    milliseconds,
    print_json,
    require_extra,
    require_sources,
    status,
)
from hsdopt.errors import InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsdopt.plan import Plan
    from hsdopt.runtime import Counters, Generation, Model
    from hsdopt.runtime.calm import CalmSession

PlanText = Annotated[str, typer.Option("--plan", help="A plan in notation, or a plan.json.")]
Prompt = Annotated[str, typer.Option("--prompt", help="What to answer, or with --no-chat to continue.")]
ProfilePath = Annotated[Path | None, typer.Option("--profile", help="The profile whose models the plan names.")]
Drafts = Annotated[
    list[str] | None, typer.Option("--draft", help="Where a name of the plan comes from, NAME=SOURCE; repeat for more.")
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this probability.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Keep so many tokens; 0 keeps all.")]
Stops = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the output; repeat for more.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the profile's, else cpu.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Of every model: float32, bfloat16, ...")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Run networks through torch.compile: slow first passes, faster later ones.")
]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="auto spreads a target that is larger than one device.")
]
NoChat = Annotated[bool, typer.Option("--no-chat", help="Feed the prompt as it is, without a chat template.")]
Stats = Annotated[bool, typer.Option("--stats", help="Show passes, acceptance and times.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON when the text is complete.")]


def generate(
    plan: PlanText,
    prompt: Prompt,
    profile: ProfilePath = None,
    draft: Drafts = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stops = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Remote = False,
    device_map: DeviceMap = None,
    compile_networks: Compile = False,
    no_chat: NoChat = False,
    stats: Stats = False,
    as_json: Json = False,
) -> None:
    """Write text with a plan."""
    with require_extra("runtime"):
        from hsdopt.runtime import generate as write
    parsed = load_plan(plan)
    if profile is not None and draft:
        raise InvalidArgumentError("expected --profile or --draft, not both: a profile names the sources of its models")
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "device_map": device_map}
    models = _load(parsed, profile, draft or (), device=device, compile=compile_networks, **options)
    target = models[parsed.target]
    stream = None if as_json else _Stream(target)
    exits = _exits(parsed, models)
    output = write(
        parsed,
        models,
        _ids(prompt, target, chat=not no_chat),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop or (),
        seed=seed,
        on_token=stream,
        sessions=exits,
    )
    if stream is None:
        print_json(_to_json(parsed, output, exits))
    else:
        stream.close()
    if stats:
        _show(output, exits)


def _load(
    plan: Plan,
    profile: Path | None,
    drafts: Sequence[str],
    *,
    device: str | None,
    **options: Any,  # noqa: ANN401 -- handed on
) -> Mapping[str, Model]:
    """Return the models of the profile, or those that the names of the plan stand for, the target first."""
    from hsdopt.runtime import load_models

    if profile is not None:
        profiled = load_profile(profile)
        require_sources(profiled)
        where = profiled.models[profiled.target].device if device is None else device
        return load_models(profiled, device=where, **options)
    given = aliases(drafts)
    sources = {name: given.get(name, name) for name in reversed(plan.models)}
    where = "cpu" if device is None else device
    return load_models(sources, device=where, **options)


def _exits(plan: Plan, models: Mapping[str, Model]) -> dict[str, CalmSession]:
    """Open sessions of the models with confidence exits here, so that the layers they run can be told."""
    return {
        name: cast("CalmSession", models[name].session())
        for name in plan.models
        if name in models and models[name].confidence is not None
    }


def _ids(prompt: str, target: Model, *, chat: bool) -> list[int]:
    from hsdopt.profiling.workload import Prompt as Request
    from hsdopt.profiling.workload import render

    if target.tokenizer is None:
        raise ModelError(f"expected a tokenizer with {target.name}; it has none: add one to its folder")
    return render(Request("prompt", prompt), target.tokenizer) if chat else target.tokenizer.encode(prompt)


class _Stream:
    """Writes text to stdout token by token, whole characters only."""

    def __init__(self, target: Model) -> None:
        self._tokenizer = target.tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, token: int) -> None:
        """Add a token, and write what it completes."""
        self._tokens.append(token)
        text = self._text()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._write(text)
            if text.endswith("\n"):  # decoding goes on from a line's end, so that its time does not grow with the text
                self._tokens = [token]
                self._shown = self._text()

    def close(self) -> None:
        """Write what is left, and end the line."""
        self._write(self._text())
        sys.stdout.write("\n")

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)) if self._tokenizer else ""

    def _write(self, text: str) -> None:
        sys.stdout.write(text[len(self._shown) :])
        sys.stdout.flush()
        self._shown = text


def _to_json(plan: Plan, output: Generation, exits: Mapping[str, CalmSession]) -> dict[str, Any]:
    counters = output.counters
    layers = {name: {"mean_layers": session.mean_layers} for name, session in exits.items() if session.layers_used}
    return {
        "plan": str(plan),
        "text": output.text,
        "tokens": list(output.tokens),
        "finish_reason": output.finish_reason,
        "seconds": asdict(output.seconds),
        "seconds_per_token": output.seconds_per_token if len(output.tokens) > 1 else None,
        "tokens_per_pass": counters.tokens_per_pass if counters.passes else None,
        "models": {
            name: {
                "passes": counters.passes.get(name, 0),
                "seconds": counters.seconds.get(name, 0.0),
                **layers.get(name, {}),
            }
            for name in plan.models
        },
        "edges": [
            {"drafter": drafter, "verifier": verifier, **asdict(edge)}
            for (drafter, verifier), edge in counters.edges.items()
        ],
    }


def _show(output: Generation, exits: Mapping[str, CalmSession]) -> None:
    """Print counts and times on stderr, where they do not mix with the text."""
    counters = output.counters
    console = status()
    decode = output.seconds.decode
    rate = f", {milliseconds(output.seconds_per_token)} ms per token" if len(output.tokens) > 1 else ""
    console.print(
        f"{len(output.tokens)} tokens ({output.finish_reason}): prefill {output.seconds.prefill:.2f} s,"
        f" decoding {decode:.2f} s{rate}, {counters.tokens_per_pass:.2f} tokens per pass of {output.target}"
    )
    for name, session in exits.items():
        console.print(f"{name}: {session.mean_layers:.2f} of {session.layers} layers per token")
    console.print(_times(counters, decode))
    if counters.edges:
        console.print(_edges(counters))


def _times(counters: Counters, decode: float) -> Any:  # noqa: ANN401 -- rich is imported where it is used
    from rich.table import Table

    table = Table("model", title="time by model", title_justify="left")
    for heading in ("passes", "seconds", "ms per pass", "share"):
        table.add_column(heading, justify="right")
    for name, seconds in counters.seconds.items():
        passes = counters.passes.get(name, 0)
        each = milliseconds(seconds / passes) if passes else ""
        table.add_row(name, str(passes), f"{seconds:.3f}", each, f"{seconds / decode:.1%}" if decode else "")
    other = max(decode - sum(counters.seconds.values()), 0.0)
    table.add_row("everything else", "", f"{other:.3f}", "", f"{other / decode:.1%}" if decode else "")
    return table


def _edges(counters: Counters) -> Any:  # noqa: ANN401 -- rich is imported where it is used
    from rich.table import Table

    table = Table("drafter", "verifier", title="acceptance", title_justify="left")
    for heading in ("drafted", "accepted", "accepted/drafted", "drafts with at least 1, 2, ... accepted"):
        table.add_column(heading, justify="right")
    for (drafter, verifier), edge in counters.edges.items():
        curve = " ".join(str(count) for count in edge.accepted_at)
        rate = f"{edge.acceptance:.3f}" if edge.drafted else ""
        table.add_row(drafter, verifier, str(edge.drafted), str(edge.accepted), rate, curve)
    return table
