"""Outer math: pure functions on CPU tensors, without time or network.

    fragments   which elements travel together, and how they get in and out of a model
    codecs      elements <-> bytes, for contributions (up) and for update records (down)
    lossy       two more of them, which need error feedback, for contributions only
    merge       radial-directional averaging
    optimizer   pseudo-gradient, token-weighted mean, outer Nesterov and Delayed Nesterov
    rates       outer learning rate and momentum, inner steps of slow peers
    local       outer steps after which peers differ by design
    digest      names for values, so that replicas can be compared and repaired in parts

A further merge rule, outer optimizer or fragment pattern is a further pure function beside these.
"""
