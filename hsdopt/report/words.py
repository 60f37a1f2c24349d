"""What is said of figures and words, the same on every page."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CAPTIONS", "WORDS"]

CAPTIONS: Mapping[str, str] = {
    "simulated-against-real": "Every plan, predicted against measured: points on the line are right, points in the "
    "grey band are within 5 %, and points below the line promised more speed than the clock gave.",
    "prediction-errors": "Every way to predict against the clock, one point per plan: above, with what the models said "
    "on the timed prompts; below, hollow, from the profile alone. The black bar is the median; points in the grey band "
    "are within 5 %, and points to the left promised more speed than the clock gave.",
    "run-distribution": "How long single outputs of the chosen plan took, and how long the simulations said: "
    "the curves lie on each other where the prediction knows not only the mean but also the spread over prompts.",
    "transfer-intervals": "Where the profile said each plan's time would lie (bars), and where it lay (points): "
    "crosses are misses. Wide bars are honest about few prompts; many crosses are not.",
    "latency-against-memory": "What memory buys: each plan's time against the weights it needs loaded. The red steps "
    "are the plans than which no other lossless one is both smaller and faster.",
    "speedups": "How many times as fast as the target alone each plan ran: a plan whose bar of uncertainty crosses "
    "the dashed line may not be faster at all. Hollow bars are what transformers' own generate() took.",
    "where-the-time-goes": "Time per token by the model that spent it: a good plan buys a shorter black bar (the "
    "target) with little colour (its drafters).",
    "cost-curves": "Seconds of one pass by the number of tokens it reads: the flatter the target's line, the cheaper "
    "it is to check a long draft.",
    "cost-curves-relative": "The same costs in units of each model's own one-token pass: a line that climbs early "
    "punishes long drafts.",
    "acceptance-heatmap": "How often a verifier keeps a drafter's token: dark squares are pairs that agree.",
    "acceptance-by-position": "The chance that a whole draft of m tokens survives: where a line falls below one in "
    "two, more draft tokens mostly go to waste.",
}
"""What to see in each figure, by name."""

WORDS = {
    "Plan": "Who drafts for whom: target(draft:5) means that draft proposes 5 tokens, and the target checks them in "
    "one pass. Deeper brackets are drafters of drafters; a comma is a row, one drafter after another.",
    "Measured": "Time from the end of the prompt's processing to the last token, over the tokens after the first, "
    "pooled over prompts and repeats; in brackets the interval over prompts.",
    "Error": "Predicted over measured, less one: +3 % means that the plan ran faster than predicted. Model error "
    "uses what the models said on the very prompts timed; transfer error uses the profiling prompts.",
    "Error from acceptance, from cost": "The passes predicted against the passes made, both at profiled costs; and "
    "those passes at profiled costs against the seconds they took. Together they make the error, but for the time "
    "spent outside the passes.",
    "Tokens per pass": "Tokens gained by one pass of the target; 1 without a draft.",
    "Regret": "How much slower the chosen plan was than the fastest one measured. The fastest is picked on odd "
    "repeats and both are timed on even ones, so luck does not count and the figure may be negative.",
    "Predicted interval": "Where the profile says that a plan's time over these many new prompts lies, before any of "
    "them is run. Right are intervals that hold the measured time of about 95 % of plans, and among those narrow ones.",
    "Rank agreement": "Of the pairs of plans that the clock tells apart, the share that the prediction orders rightly.",
}
