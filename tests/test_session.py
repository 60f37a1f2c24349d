"""The session scores what a full forward pass would, whatever was fed and cropped before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, tiny_model, tiny_network

from hsdopt.errors import CacheError, InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from hsdopt.runtime.models import Model

torch.set_num_threads(1)
MODELS = {name: tiny_model(architecture=name) for name in ("llama", "gpt2", "qwen2", "gemma")}


def full_logits(model: Model, sequence: list[int]) -> torch.Tensor:
    """Logits [length, vocab_size] of one pass without a cache: the oracle."""
    with torch.inference_mode():
        return model.network(torch.tensor([sequence]), use_cache=False).logits[0, :, : model.vocab_size]


steps = st.lists(
    st.tuples(st.integers(0, 24), st.lists(st.integers(0, VOCAB - 1), max_size=8), st.integers(1, 6)), max_size=8
)


@pytest.mark.parametrize("architecture", MODELS)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(steps=steps)
def test_logits_equal_a_full_pass_after_any_feeding_and_cropping(
    architecture: str, steps: list[tuple[int, list[int], int]]
) -> None:
    model = MODELS[architecture]
    session = model.session()
    sequence = [7]
    for keep, added, wanted in steps:
        sequence = [*sequence[: max(1, keep)], *added]
        n_logits = min(wanted, len(sequence))
        logits = session.forward(sequence, n_logits)
        assert logits.shape == (n_logits, model.vocab_size)
        torch.testing.assert_close(logits, full_logits(model, sequence)[-n_logits:], rtol=0, atol=1e-10)
        assert session.tokens == tuple(sequence)


def test_only_what_is_missing_is_fed() -> None:
    session = tiny_model().session()
    session.forward([1, 2, 3, 4, 5])
    assert session.pending([1, 2, 3, 9, 9, 9]) == 3
    session.forward([1, 2, 3, 9, 9, 9])
    assert session.pending([1, 2, 3, 9, 9, 9]) == 1
    session.forward([1, 2, 3, 9, 9, 9])
    session.forward([1, 2, 3, 9], 2)
    assert [(p.new_tokens, p.context, p.prefill) for p in session.passes] == [
        (5, 0, True),
        (3, 3, False),
        (1, 5, False),
        (2, 2, False),
    ]
    assert all(p.seconds > 0 for p in session.passes)


def test_crop_keeps_the_prefix_and_takes_no_negative_length() -> None:
    session = tiny_model().session()
    session.crop(0)
    session.forward([5, 6, 7])
    session.crop(9)
    assert session.tokens == (5, 6, 7)
    session.crop(1)
    assert session.tokens == (5,)
    session.crop(0)
    assert session.tokens == ()
    torch.testing.assert_close(session.forward([8]), full_logits(MODELS["llama"], [8]), rtol=0, atol=1e-10)
    with pytest.raises(InvalidArgumentError, match="at least 0 to crop to; got -1"):
        session.crop(-1)


def test_the_cache_outgrows_its_first_buffer() -> None:
    model = tiny_model(positions=2048)
    session, sequence = model.session(), [index * 7 % VOCAB for index in range(700)]
    for length in (250, 260, 520, 519, 700):
        logits = session.forward(sequence[:length], 2)
    torch.testing.assert_close(logits, full_logits(model, sequence)[-2:], rtol=0, atol=1e-10)


def test_padded_rows_are_cut_off() -> None:
    model = tiny_model(vocab=VOCAB + 13)
    assert model.vocab_size == VOCAB
    assert model.session().forward([1, 2]).shape == (1, VOCAB)


def test_room_and_positions() -> None:
    session = tiny_model(positions=8).session()
    session.forward([1, 2, 3])
    assert session.room == 5
    session.forward(list(range(8)))
    assert session.room == 0
    with pytest.raises(ModelError, match=r"tiny: expected at most 8 tokens.*; got 9: shorten"):
        session.forward(list(range(9)))
    assert session.tokens == tuple(range(8))


@pytest.mark.parametrize("n_logits", [0, 4])
def test_positions_to_score_are_checked(n_logits: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"expected 1 to 3 positions to score; got {n_logits}"):
        tiny_model().session().forward([1, 2, 3], n_logits)


def test_a_pass_that_fails_leaves_a_session_that_is_right() -> None:
    model = tiny_model()
    session = model.session()
    session.forward([1, 2, 3])
    with pytest.raises(IndexError):
        session.forward([1, 2, 3, 10**6])
    assert session.tokens == ()
    expected = full_logits(model, [1, 2, 3, 4])[-1:]
    torch.testing.assert_close(session.forward([1, 2, 3, 4]), expected, rtol=0, atol=1e-10)


def test_a_cache_that_forgets_is_refused_by_name() -> None:
    why = "LinearAttentionLayer keeps a state that forgets"
    with pytest.raises(CacheError, match=rf"^tiny: expected a cache.*MambaForCausalLM: {why}.*attention in every"):
        tiny_model(architecture="mamba")


def test_sessions_of_one_model_do_not_meet() -> None:
    model = tiny_model()
    one, two = model.session(), model.session()
    one.forward([1, 2, 3])
    torch.testing.assert_close(two.forward([4, 5]), full_logits(model, [4, 5])[-1:], rtol=0, atol=1e-10)
    assert one.tokens == (1, 2, 3)


def test_noise_makes_a_drafter_that_agrees_less() -> None:
    ids = torch.arange(3, 203).reshape(1, -1)
    picks = [tiny_network(noise=noise)(ids).logits[0].argmax(-1) for noise in (0.0, 0.02, 0.3)]
    agreement = [(picks[0] == other).double().mean().item() for other in picks]
    assert agreement[0] == 1.0
    assert 1.0 > agreement[1] > agreement[2]
