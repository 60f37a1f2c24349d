"""What training makes small: cross-entropy on the target's tokens, and the divergence from its distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hsdopt.runtime.calibration import IGNORED

if TYPE_CHECKING:
    from hsdopt.runtime.alignment import Recipe
    from hsdopt.runtime.calibration import Batch
    from hsdopt.runtime.students import Students

__all__ = ["loss_of", "places_in_head"]


def loss_of(logits: torch.Tensor, batch: Batch, recipe: Recipe, places: torch.Tensor | None) -> torch.Tensor:
    """Return cross-entropy on the target's tokens, and the divergence from its distribution if it has a weight.

    Parameters
    ----------
    logits : Tensor [n, vocab]
        Of a student at the places of the batch; of a small head [n, ids].
    batch : Batch
        What the target wrote there.
    recipe : Recipe
        Which labels count, and how much the distribution does.
    places : Tensor [vocab] of int or None
        Where in a small head every id stands, as `places_in_head` returns it.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch.best if recipe.labels == "argmax" else batch.outputs
    labels = labels if places is None else places[labels]
    counted = (labels != IGNORED).sum().clamp_min(1)  # a batch may have no label within a small head
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / counted
    if recipe.soft and batch.top is not None:
        loss = loss + recipe.soft * _divergence(logits, batch.top, places)
    return loss


def _divergence(
    logits: torch.Tensor, top: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor | None
) -> torch.Tensor:
    """Return the mean divergence KL(target || student) over the target's top tokens and, as one more, all others.

    Tokens outside a small head count among the others. Merging tokens gives a lower bound of the whole divergence.
    """
    ids, log_target = top[0], top[1].to(logits.dtype)
    at = ids if places is None else places[ids]
    known = at != IGNORED
    log_student = logits.log_softmax(-1).gather(-1, at.clamp_min(0))
    target = torch.where(known, log_target.exp(), 0.0)
    student = torch.where(known, log_student.exp(), 0.0)
    least = 1e-6  # of the rest, whose rounded difference may vanish
    rest = (1 - target.sum(-1)).clamp(least, 1), (1 - student.sum(-1)).clamp(least, 1)
    inner = (target * torch.where(known, log_target - log_student, 0.0)).sum(-1)
    return (inner + rest[0] * (rest[0].log() - rest[1].log())).mean()


def places_in_head(students: Students) -> torch.Tensor | None:
    """Return where in a small head every id stands, IGNORED for those it lacks; None for whole heads."""
    heads = students.heads()
    if not heads:
        return None
    places = torch.full((heads[0].out_features,), IGNORED, device=students.device)
    places[heads[0].ids] = torch.arange(len(heads[0].ids), device=students.device)
    return places
