"""`hsdopt generate` writes what `generate` writes; counts and times go elsewhere than the text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tiny import save_tiny, tiny_tokenizer
from typer.testing import CliRunner

from hsdopt.cli.app import app
from hsdopt.runtime import generate, load_models

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, noise=noise) for name, noise in (("big", 0.0), ("small", 0.02))}


def call(folders: dict[str, Path], *more: str, plan: str = "big(small:3)") -> Result:
    drafts = [part for name, folder in folders.items() for part in ("--draft", f"{name}={folder}")]
    arguments = ["generate", "--plan", plan, "--prompt", "Say it.", "--max-new-tokens", "16", *drafts, *more]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def expected(folders: dict[str, Path], prompt: list[int]) -> str:
    models = load_models({name: str(folder) for name, folder in folders.items()})
    return generate("big", models, prompt, max_new_tokens=16).text


def test_text_alone_on_stdout_and_stats_on_stderr(folders: dict[str, Path]) -> None:
    result = call(folders, "--no-chat", "--stats")
    assert result.exit_code == 0
    assert result.stdout == expected(folders, tiny_tokenizer().encode("Say it.")) + "\n"
    for word in ("tokens per pass of big", "time by model", "everything else", "acceptance"):
        assert word in result.stderr


def test_a_chat_template_is_applied_unless_told(folders: dict[str, Path]) -> None:
    ids = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "Say it."}], add_generation_prompt=True, return_dict=False
    )
    assert call(folders).stdout == expected(folders, ids) + "\n"


def test_json_holds_text_counts_and_times(folders: dict[str, Path]) -> None:
    value = json.loads(call(folders, "--json", "--no-chat").stdout)
    assert value["plan"] == "big(small:3)"
    assert value["text"] == expected(folders, tiny_tokenizer().encode("Say it."))
    assert value["tokens_per_pass"] >= 1
    assert value["models"]["small"]["passes"] > 0
    assert [(edge["drafter"], edge["verifier"]) for edge in value["edges"]] == [("small", "big")]


def test_seeds_make_sampling_repeatable(folders: dict[str, Path]) -> None:
    hot = ("--temperature", "1.5", "--no-chat", "--seed")
    one, again, other = (call(folders, *hot, seed).stdout for seed in ("1", "1", "2"))
    assert one == again != other


def test_bad_input(folders: dict[str, Path]) -> None:
    def said(*more: str, plan: str = "big(small:3)") -> str:
        result = call(folders, *more, plan=plan)
        assert result.exit_code == 2
        assert not result.stdout
        return result.stderr

    assert "expected a draft length after small" in said(plan="big(small)")
    assert "nowhere-to-be-found" in said(plan="big(nowhere-to-be-found:2)")
    assert "--profile or --draft, not both" in said("--profile", "profile.json")
