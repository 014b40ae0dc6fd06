"""A decoder class of transformers, run by its own modules with this engine's attention, cache, products and ranks.

For classes whose layers ``models/recognition`` does not find to be native ones::

    attention.py   transformers' attention interface over the paged cache: a place for each call of a step
    linears.py     linear layers, split by the class's plan for tensor parallelism, or gathered
    body.py        the class's modules with these in their place, and the names of its tensors
    decoder.py     the model on a rank
    interview.py   what a class asks of attention, and what it does behind its head: ``ClassModules``
    guard.py       a narrow model of the class by this way, on 1, 2 and 4 ranks: equal logits, or a refusal

The last two run in the process that asks (``recognition/child.py``).
"""
