"""The studies in reading order: the model, its parts, its attention."""

from __future__ import annotations

from flashattn.report.studies import (
    accuracy,
    attention,
    compile,  # noqa: A004 - the name of the study
    flash,
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
    *(lm, warmup, profile, precision, memory),
    *(attention, compile, flash, masks, scores, launch, parallel, accuracy),
)
