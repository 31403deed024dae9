"""Outer math: tensors on the CPU, without time or network.

    fragments   which elements travel together, and how they get in and out of a model
    payloads    the interface of a codec; `codecs` and, with error feedback, `lossy` are the codecs
    digest      names for values, so that replicas can be compared and repaired in parts
    replica     every peer's half of a fragment: anchor, pseudo-gradient, updates
    aggregate   the author's half: contributions in, outer step, update out
    robust      what each contribution counts, by comparison
    merging     merge rules, and what evens out a merged matrix before the outer step
    optimizer   outer optimizers, and how large their steps are

How to add to them: `docs/extend.md`.
"""
