"""`hsdopt profile`: measure pass costs and acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import (
    aliases,
    load_profile,
    milliseconds,
    output,
    print_json,
    progress_bar,
    require_extra,
    status,
    whole_numbers,
)

if TYPE_CHECKING:
    from hsdopt.profiles import Profile

Target = Annotated[
    str, typer.Option("--target", help="The model to speed up: built-in name, folder, GGUF file or hub id.")
]
Drafts = Annotated[list[str], typer.Option("--draft", help="A drafter, as SOURCE or NAME=SOURCE; repeat for more.")]
Prompts = Annotated[str, typer.Option("--prompts", help="mixed, copy, chat, or a file of prompts.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens written per prompt.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)]
TopK = Annotated[int, typer.Option("--top-k", min=0)]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; the model's own if not given.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
Contexts = Annotated[str | None, typer.Option("--contexts", help="Context lengths to time, such as 64,256,1024.")]
Count = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use at most this many profiling prompts.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Timings of every kind of pass.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted profile.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def profile(
    target: Target,
    draft: Drafts,
    prompts: Prompts,
    output_path: Out = Path("profile.json"),
    max_new_tokens: NewTokens = 48,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: Threads = None,
    contexts: Contexts = None,
    max_prompts: Count = None,
    repeats: Repeats = 5,
    resume: Resume = False,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Measure each model's pass cost and every pair's acceptance on your hardware and prompts."""
    with require_extra("runtime"):
        from hsdopt.profiling import Setting, load_workload
        from hsdopt.profiling import profile as measure
        from hsdopt.runtime import load_models

    journal = output_path.with_name(output_path.name + ".partial")
    if output_path.exists() and resume and not journal.exists():
        status().print(f"{output_path} is complete already", style="dim")
        _show(output_path, as_json=as_json)
        return
    named = aliases([target, *draft])
    names = list(named)
    workload = load_workload(prompts)
    if max_prompts is not None:
        workload = workload.take(2 * max_prompts)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    models = load_models(named, device=device, dtype=dtype, threads=threads, trust_remote_code=trust_remote_code)
    setting = Setting(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens)
    with progress_bar() as report:
        measured = measure(
            names[0],
            names[1:],
            workload,
            models=models,
            journal=journal,
            setting=setting,
            contexts=whole_numbers(contexts, "contexts"),
            repeats=repeats,
            resume=resume,
            progress=report,
        )
    measured.save(output_path)
    journal.unlink(missing_ok=True)
    _show(output_path, as_json=as_json)


def _show(path: Path, *, as_json: bool) -> None:
    """Print what a profile holds: costs and acceptance of every model."""
    profiled = load_profile(path)
    rows = [_row(profiled, name) for name in reversed(profiled.names)]
    if as_json:
        print_json({"profile": str(path), "models": rows})
        return
    from rich.table import Table

    table = Table("model", title=f"{path}: ms per pass, and acceptance by {profiled.target}", title_justify="left")
    for heading in ("c(1)", "c(4)", "c(8)", "c(16)", "acceptance", "positions", "MB"):
        table.add_column(heading, justify="right")
    for row in rows:
        costs = ["" if seconds is None else milliseconds(seconds) for seconds in row["seconds_per_pass"].values()]
        rate = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        table.add_row(row["model"], *costs, rate, str(row["positions"] or ""), f"{row['bytes'] / 1e6:.0f}")
    output().print(table)


def _row(profiled: Profile, name: str) -> dict[str, Any]:
    cost = profiled.cost(name)
    law = None if name == profiled.target else profiled.acceptance(name, profiled.target)
    seconds = {n: cost(n, profiled.context) if n <= cost.max_tokens else None for n in (1, 4, 8, 16)}
    return {
        "model": name,
        "seconds_per_pass": seconds,
        "acceptance": None if law is None else law.rate,
        "positions": law.trials[0] if law is not None and law.trials else None,
        "bytes": profiled.models[name].bytes,
    }
