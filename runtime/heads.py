"""Heads over some tokens only: cheap to compute, and enough for a drafter."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from hsdopt.errors import InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from hsdopt.runtime.calibration import Example

__all__ = ["SubsetHead", "frequent_tokens", "shrink_head", "whole_head"]


class SubsetHead(nn.Module):
    """A head over some ids only, whose logits stand at these ids; all others are out of reach.

    Parameters
    ----------
    whole : nn.Linear
        The head that it is cut from, with weights [vocab, width]; kept to be saved, unless it is told to `forget`.
    ids : Tensor [k] of int
        The ids that are left.
    """

    ids: torch.Tensor

    def __init__(self, whole: nn.Linear, ids: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = whole.weight.shape
        with torch.device("meta"):
            self.inner = nn.Linear(self.in_features, len(ids), bias=whole.bias is not None)
        # a linear layer within, which quantised copies find and quantise
        for name, weight in whole.named_parameters():
            rows = nn.Parameter(weight.detach()[ids].clone(), requires_grad=weight.requires_grad)
            setattr(self.inner, name, rows)
        self.register_buffer("ids", ids)
        self.spread = True
        self._whole: tuple[nn.Linear, ...] = (whole,)  # in a tuple, and so no part of the network

    @property
    def whole(self) -> nn.Linear:
        """The head that it was cut from.

        Raises
        ------
        ModelError
            If it was let go of.
        """
        if not self._whole:
            raise ModelError(
                "expected a drafter whose head is whole, or rows of its embeddings; got a small head of its own:"
                " start from another drafter"
            )
        return self._whole[0]

    def forget(self) -> None:
        """Let go of the whole head, and of its memory."""
        self._whole = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to logits [..., vocab], or to those of the ids alone, [..., k], while `spread` is off."""
        small: torch.Tensor = self.inner(x)
        if not self.spread:
            return small
        # finite, so that no product with a probability of zero is undefined; its softmax is exactly zero
        logits = small.new_full((*small.shape[:-1], self.out_features), torch.finfo(small.dtype).min / 2)
        logits[..., self.ids] = small
        return logits


def shrink_head(network: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """Give `network` a head over `ids` only, in place; return it."""
    head = network.get_output_embeddings()
    rows = torch.tensor(sorted(ids), device=head.weight.device)
    network.set_output_embeddings(SubsetHead(head, rows))
    return network


def whole_head(network: PreTrainedModel) -> PreTrainedModel:
    """Give `network` its whole head back, in place, if it has a small one; return it.

    Raises
    ------
    ModelError
        If the whole head was let go of.
    """
    head = network.get_output_embeddings()
    if isinstance(head, SubsetHead):
        network.set_output_embeddings(head.whole)
    return network


def frequent_tokens(examples: Iterable[Example], count: int, *, vocab_size: int, ends: Iterable[int]) -> list[int]:
    """Return the `count` most frequent ids of the target's outputs, sorted; ends of text are always among them.

    Where the outputs hold fewer, the lowest ids fill up: tokenizers that merge pairs number them by frequency.

    Raises
    ------
    InvalidArgumentError
        If `count` is not between the number of ends and the vocabulary's size.

    Examples
    --------
    >>> from hsdopt.runtime.calibration import Example
    >>> frequent_tokens([Example(0, (9, 7, 7, 8), 1, (7, 7, 8))], 3, vocab_size=10, ends=[2])
    [2, 7, 8]
    """
    first = list(dict.fromkeys(ends))
    if not max(1, len(first)) <= count < vocab_size:
        raise InvalidArgumentError(
            f"expected a head of {max(1, len(first))} to {vocab_size - 1} tokens; got {count}: leave it out for all"
        )
    seen = Counter(token for example in examples for token in example.best)
    common = [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))]
    return sorted(list(dict.fromkeys([*first, *common, *range(vocab_size)]))[:count])
