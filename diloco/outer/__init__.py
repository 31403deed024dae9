"""Outer math: tensors on the CPU, without time or network.

    fragments   which elements travel together, and how they get in and out of a model
    payloads    the interface of a codec; `codecs` and, with error feedback, `lossy` are the codecs
    digest      names for values, so that replicas can be compared and repaired in parts
    replica     every peer's half of a fragment: anchor, pseudo-gradient, updates
    held        the syncer's half: contributions in, outer step, update out
    merging     merge rules; their math is in `rda` and `robust`, and `staged` keeps what they compare
    optimizer   outer optimizers; `rates` says how large their steps are

A new algorithm is a class in one of three registries, and its name in one of the Literals at the top of
`diloco/config/groups.py`. It is tested by the contract test of its registry as soon as it is there, and what does not
fit together (`_contradictions` in groups.py) is refused for it as for its neighbours in the Literal.

    merge rule        an `Average` or `Judge` in merging.py > `RULES`; groups.py > `Average`, or `OwnJudge` when it
                      takes the place of the average, else `AveragedJudge`
    outer optimizer   an `OuterOptimizer` in optimizer.py > `OPTIMIZERS`; groups.py > `SteppedOptimizer`, or
                      `WindowedOptimizer` when momentum steps belong to outer.delay contributions; a preset
                      configs/outer/NAME.yaml, and how to make it small in tests/test_presets.py
    codec             a `Codec` in codecs.py > `CODECS`, or in lossy.py > `LOSSY` when it cannot publish updates;
                      groups.py > `WideCodec` (over a byte per value), `NarrowCodec` or `LossyCodec`
"""
