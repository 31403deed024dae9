"""Outer math: pure functions on CPU tensors, without time, network or configuration objects.

    fragments   which elements travel together, and how they get in and out of a model
    codecs      elements <-> bytes, for contributions (up) and for update records (down)
    optimizer   pseudo-gradient, token-weighted mean, outer Nesterov
    digest      names for values, so that replicas can be compared and repaired in parts

A further merge rule, outer optimizer or fragment pattern is a further pure function beside these.
"""
