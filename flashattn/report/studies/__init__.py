"""The studies in reading order: attention, its correctness, then the model around it."""

from __future__ import annotations

from flashattn.report.studies import (
    accuracy,
    attention,
    compile,  # noqa: A004 - the name of the study
    flash,
    heads,
    integrations,
    launch,
    lm,
    masks,
    memory,
    parallel,
    precision,
    profile,
    scores,
    warmup,
)
from flashattn.report.study import Study

STUDIES: tuple[Study, ...] = (
    *(flash, accuracy, heads, masks, scores, attention, launch, integrations, parallel),
    *(lm, memory, profile, compile, precision, warmup),
)
