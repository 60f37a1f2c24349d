"""Loading: from the names and sources that a command line or a profile gives to models that run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.files import excerpt, read_json
from hsdopt.profiles import Profile
from hsdopt.runtime import builtin
from hsdopt.runtime.calm import Confidence, with_exits
from hsdopt.runtime.drafters import read_note, restored
from hsdopt.runtime.early_exit import first_layers
from hsdopt.runtime.lookup import Bigrams, Lookup
from hsdopt.runtime.model import Model, check_vocabulary, fingerprint, tensor_bytes
from hsdopt.runtime.quantised import quantised_copy, without_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Model", "check_vocabulary", "fingerprint", "load_models", "tensor_bytes"]

_ALIAS = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)=(?P<source>.+)", re.DOTALL)
_DERIVED = re.compile(
    r"(?P<kind>int8|int4|skip:(?P<layers>\d+(?:,\d+)*)|exit:(?P<exit>\d+)|calm:(?P<calm>[^@]*))@(?P<base>.+)", re.DOTALL
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_HUB_SECONDS = 5.0
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def load_models(
    names: Iterable[str] | Mapping[str, str] | Profile,
    *,
    device: str | Mapping[str, str] = "cpu",
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, str | int] | None = None,
    compile: bool = False,  # noqa: A002 -- torch's own word
) -> dict[str, Model]:
    """Load models that share one vocabulary, under the names that plans use.

    Parameters
    ----------
    names : iterable of str, mapping from name to source, or Profile
        The target first, then its drafters. Each is a built-in name, a folder, a GGUF file, a hub id, a recipe over
        another (``int8@SOURCE``, ``int4@SOURCE``, ``skip:12,16@SOURCE`` without those layers, ``exit:20@SOURCE``
        with the first 20 only, ``calm:0.9@SOURCE`` or ``calm:0.9,similarity@SOURCE`` with confidence exits: see
        `Confidence`) or ``name=SOURCE``. A profile stands for the models that it was measured with, its
        lookup table among them.
    device : str or mapping of str to str
        Where the weights go: ``"cpu"``, ``"cuda"``, ... A mapping gives one per name, and "cpu" to those it lacks.
    dtype : str, torch.dtype or mapping of str to either, optional
        The weights' type; by default the one they are stored in (float32 for GGUF files).
    threads : int, optional
        Threads for PyTorch's operations, for the whole process.
    trust_remote_code : bool
        Whether code that comes with a model may run.
    device_map : str or mapping of str to str or int, optional
        For a target that is larger than one device: ``"auto"``, or where each part of it goes, as transformers takes
        it (``{"model.embed_tokens": 0, "model.layers.0": 0, ..., "lm_head": "cpu"}``; "disk" is a place too). The
        target, and drafters that are recipes over it, are then spread so; `device` is where the others go.
    compile : bool
        Whether networks run through `torch.compile`: the first passes take a minute or more, later ones less time.
        Networks with confidence exits run as they are.

    Returns
    -------
    dict of str to Model
        In the order given. Tensors that a drafter has in common with the target are held once.

    Raises
    ------
    ModelError
        If a source cannot be found or read, or does not fit in memory. Its subclasses say that a cache cannot be
        cropped (`CacheError`) or that vocabularies differ (`VocabularyError`).
    InvalidArgumentError
        If two models have one name, or there is none, or both `device_map` and `compile` are given.
    """
    lookup = Lookup()
    if isinstance(names, Profile):
        dtype = {name: info.dtype for name, info in names.models.items() if info.dtype} if dtype is None else dtype
        lookup = _lookup_of(names)
        names = _sources(names)
    if device_map is not None and compile:
        raise InvalidArgumentError("expected device_map or compile, not both: hooks between devices do not compile")
    sources = _named(names)
    if threads is not None:
        torch.set_num_threads(threads)
    networks = [name for name, source in sources.items() if source != "lookup"]
    if not networks:
        raise InvalidArgumentError("expected a model with weights beside the lookup drafter; got none")
    spread = None if device_map is None else _base(sources[networks[0]])
    loaders = _Loaders(device, dtype, trust_remote_code=trust_remote_code, device_map=device_map, spread=spread)
    loaders.check_memory({name: sources[name] for name in networks})
    loaded = {name: loaders.of(name, sources[name]).load(name, sources[name]) for name in networks}
    target = loaded[networks[0]]
    for drafter in list(loaded.values())[1:]:
        check_vocabulary(target, drafter)
        _share(target, drafter)
    if compile:
        loaded = {name: model.with_compiler() for name, model in loaded.items()}
    return {name: loaded.get(name) or Model.of_lookup(lookup, target, name=name) for name in sources}


@dataclass
class _Loaders:
    """One loader per device and type; one more for the source `spread`, which goes where `device_map` says."""

    device: str | Mapping[str, str]
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None
    trust_remote_code: bool = field(kw_only=True)
    device_map: str | Mapping[str, str | int] | None = None
    spread: str | None = None
    made: dict[tuple[torch.device | None, torch.dtype | None], _Loader] = field(default_factory=dict)

    def of(self, name: str, source: str) -> _Loader:
        """Return the loader for the model called `name`."""
        device = self.device if isinstance(self.device, str) else self.device.get(name, "cpu")
        dtype = self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype
        spread = self.spread is not None and _base(source) == self.spread
        key = (None if spread else _device(device), _dtype(dtype))
        if key not in self.made:
            device_map = self.device_map if spread else None
            self.made[key] = _Loader(*key, device_map=device_map, trust_remote_code=self.trust_remote_code)
        return self.made[key]

    def check_memory(self, sources: Mapping[str, str]) -> None:
        """Raise ModelError if the weights behind all `sources`, by name, do not fit together; nothing is loaded yet."""
        needs: dict[torch.device, dict[tuple[int, str], int]] = {}
        for name, source in sources.items():
            loader, base = self.of(name, source), _base(source)
            need = loader.need(base)
            if loader.device is not None:  # what is spread takes what it finds
                needs.setdefault(loader.device, {})[id(loader), base] = need
        for device, by_source in needs.items():
            _require_free(device, sum(by_source.values()), " and ".join(base for _, base in by_source))


@dataclass
class _Loader:
    """Loads sources one by one, and every source once: recipes share the weights of what they start from."""

    device: torch.device | None
    dtype: torch.dtype | None
    trust_remote_code: bool = field(kw_only=True)
    device_map: str | Mapping[str, str | int] | None = field(kw_only=True)
    bases: dict[str, Model] = field(default_factory=dict)

    def need(self, source: str) -> int:
        """Return the bytes that loading a source without recipe takes at its peak.

        Raises
        ------
        ModelError
            If there are no weights that can be read, or they are of a kind that cannot be spread over devices.
        """
        folder, gguf = self._locate(source)
        if self.device_map is not None and gguf is not None:
            raise ModelError(f"expected a folder or a hub id to spread over devices; got {source}: convert it first")
        _check_weights(source, folder, gguf)
        return _stored_bytes(folder if gguf is None else folder / gguf, self.dtype, gguf, code=self.trust_remote_code)

    def load(self, name: str, source: str) -> Model:
        source = _expanded(source)
        if source not in self.bases:
            derived = _DERIVED.fullmatch(source)
            self.bases[source] = self._derive(name, derived) if derived else self._read(name, source)
        return _renamed(self.bases[source], name, source)

    def _derive(self, name: str, recipe: re.Match[str]) -> Model:
        base = self.load(name, recipe["base"])
        _check_base(base, recipe)
        if recipe["calm"] is not None:
            return _exiting(base, Confidence.parse(recipe["calm"]), name)
        if recipe["layers"] is not None:
            skipped = [int(number) for number in recipe["layers"].split(",")]
            made, precision, parameters = without_layers(base.network, skipped), base.precision, None
        elif recipe["exit"] is not None:
            made, precision, parameters = first_layers(base.network, int(recipe["exit"])), base.precision, None
        else:
            precision, parameters = recipe["kind"], base.parameters
            made = quantised_copy(base.network, "int8" if precision == "int8" else "int4")
        return Model.of(made, base.tokenizer, name=name, precision=precision, parameters=parameters)

    def _read(self, name: str, source: str) -> Model:
        folder, gguf = self._locate(source)
        try:
            with builtin.quiet():
                network, tokenizer = self._pretrained(folder, gguf)
        except Exception as error:  # damaged files raise whatever their reader happens to trip over
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(f"expected a causal language model in {source}; {said}") from error
        if gguf is None:
            network = restored(network, read_note(folder), lambda owner: self.load(owner, owner).network)
        return Model.of(network, tokenizer, name=name)

    def _pretrained(self, folder: Path, gguf: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        options: dict[str, object] = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        if gguf is not None:
            options["gguf_file"] = gguf
        placed = {} if self.device_map is None else {"device_map": _plain(self.device_map)}
        dtype = self.dtype or (torch.float32 if gguf else "auto")
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        kind = AutoModelForCausalLM if gguf or not _encodes(folder, options) else AutoModelForSeq2SeqLM
        network = kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, **placed, **options)
        if gguf is not None:
            network = builtin.unquantised(network)
        network = network if self.device is None else network.to(self.device)
        return network.eval().requires_grad_(requires_grad=False), tokenizer

    def _locate(self, source: str) -> tuple[Path, str | None]:
        """Folder, and the GGUF file in it if the source is one."""
        if source == builtin.TARGET:
            return builtin.fetch_target(), None
        path = Path(source).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return path.parent, path.name
        if path.is_dir():
            return path, None
        if path.exists():
            raise ModelError(f"expected a folder or a .gguf file; got the file {source}")
        return _hub_folder(source, code=self.trust_remote_code), None


def _sources(profile: Profile) -> dict[str, str]:
    """Return the sources of a profile's models by name, the target first."""
    names = (profile.target, *profile.drafters)
    missing = next((name for name in names if name not in profile.models), None)
    if missing is not None:
        raise ModelError(f"expected a profile that says where {missing} came from; got none: profile the models again")
    return {name: profile.models[name].source for name in names}


def _lookup_of(profile: Profile) -> Lookup:
    """Return the lookup drafter with the table that was saved with the profile."""
    if not profile.lookup:
        return Lookup()
    return Lookup(Bigrams(profile.lookup["previous"], profile.lookup["following"]))


def _named(names: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    pairs = list(names.items()) if isinstance(names, Mapping) else [_split(name) for name in names]
    sources = dict(pairs)
    if not pairs:
        raise InvalidArgumentError("expected at least one model; got none")
    if len(sources) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise InvalidArgumentError(f"expected different names; got {twice!r} twice: use name=SOURCE for one")
    return sources


def _split(text: str) -> tuple[str, str]:
    alias = None if Path(text).exists() else _ALIAS.fullmatch(text)
    return (text, text) if alias is None else (alias["name"], alias["source"])


def _expanded(source: str) -> str:
    """Replace a built-in name by its recipe, so that equal recipes are one."""
    return builtin.BUILTIN[source][0] if source in builtin.BUILTIN else source


def _check_base(base: Model, recipe: re.Match[str]) -> None:
    if base.confidence is not None:
        raise InvalidArgumentError(f"expected calm: before every other recipe; got {recipe[0]}")
    if base.network is not None and any(weight.is_meta for weight in base.network.parameters()):
        raise ModelError(f"expected all of {recipe['base']} in memory for {recipe[0]}; a part of it is offloaded")


def _plain(device_map: str | Mapping[str, str | int]) -> str | dict[str, str | int]:
    return device_map if isinstance(device_map, str) else dict(device_map)


def _exiting(base: Model, confidence: Confidence, name: str) -> Model:
    network = with_exits(base.network)
    precision, parameters = base.precision, base.parameters
    return Model.of(
        network, base.tokenizer, name=name, precision=precision, parameters=parameters, confidence=confidence
    )


def _renamed(model: Model, name: str, source: str) -> Model:
    return replace(model, name=name, source=source)


def _device(device: str) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgumentError(f"expected a device such as cpu or cuda; got {device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"expected a CUDA device for {device!r}; PyTorch finds none: use --device cpu")
    return chosen


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InvalidArgumentError(f"expected one of {', '.join(_DTYPES)} as dtype; got {dtype!r}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def _check_weights(source: str, folder: Path, gguf: str | None) -> None:
    if gguf is not None:
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"expected a model folder with config.json; {source} has none")
    if not any(folder.glob("*.safetensors")):
        found = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)), "none")
        raise ModelError(
            f"expected safetensors weights in {source}; found {found}: pickled weights are never read,"
            " convert them with save_pretrained"
        )


def _encodes(folder: Path, options: dict[str, object]) -> bool:
    return bool(AutoConfig.from_pretrained(folder, **options).is_encoder_decoder)


def _stored_bytes(path: Path, dtype: torch.dtype | None, gguf: str | None, *, code: bool = False) -> int:
    """Memory that loading takes at its peak."""
    if gguf is not None:
        return 8 * path.stat().st_size  # four bits a weight become float32
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if dtype is None or code:  # a configuration that is code says nothing before the code may run
        return stored
    kept = getattr(AutoConfig.from_pretrained(path, local_files_only=True), "dtype", None)
    return stored if kept is None else stored * dtype.itemsize // kept.itemsize


def _base(source: str) -> str:
    """Return what the recipes of a source start from."""
    while recipe := _DERIVED.fullmatch(_expanded(source)):
        source = recipe["base"]
    return source


def _require_free(device: torch.device, need: int, sources: str) -> None:
    free = _free_bytes(device)
    if need > free:
        raise ModelError(
            f"expected some {need / 1e9:.1f} GB of free memory on {device} for {sources}; got {free / 1e9:.1f} GB:"
            " close other programs, or use a smaller model or --dtype bfloat16"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _share(target: Model, drafter: Model) -> None:
    """Let a drafter use the target's tensors where its own are equal, as embeddings often are."""
    if drafter.network is None or target.network is None:
        return
    theirs = dict(target.network.named_parameters())
    for name, weight in drafter.network.named_parameters():
        other = theirs.get(name)
        if other is not None and _equal_copies(other, weight):
            weight.data = other.data


def _equal_copies(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and one.data_ptr() != other.data_ptr() and torch.equal(one, other)


def _hub_folder(source: str, *, code: bool) -> Path:
    """Find a model of the hub in its cache or download it; one line at once where neither can be."""
    if not _HUB_ID.fullmatch(source):
        raise ModelError(f"expected {_kinds()} or a hub id; {source!r} is none of them")
    patterns = [*_HUB_FILES, "*.py"] if code else _HUB_FILES
    cached = _cached_snapshot(source, patterns)
    if cached is not None:
        return cached
    try:
        HfApi().model_info(source, timeout=_HUB_SECONDS)  # asks once; the download alone would retry for minutes
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises those of whichever HTTP library it uses
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"unknown model {source!r}: not {_kinds()}, not in the hub's cache, and the hub gave none ({said})"
        ) from error


def _cached_snapshot(source: str, patterns: list[str]) -> Path | None:
    """Return the folder of a model that is whole in the hub's cache, or None."""
    try:
        folder = Path(snapshot_download(source, local_files_only=True, allow_patterns=patterns))
    except (OSError, ValueError):
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Whether all weights are there: those that the index names, or at least some."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    value = read_json(index, error=ModelError)
    files = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"expected an object weight_map from tensors to files in {index}; got {excerpt(files)}")
    return all((folder / name).exists() for name in set(files.values()))


def _kinds() -> str:
    return f"a built-in name ({', '.join(builtin.BUILTIN)}), a folder, a .gguf file"
