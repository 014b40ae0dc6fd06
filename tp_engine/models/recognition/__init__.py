"""From a decoder class of transformers to a ``ModelSpec``: asked of the class, and verified by its numbers.

Runs in a process of its own (``child.py``), because it imports transformers and runs what a stranger's config.json
makes of it.  ``model_config/asking.py`` starts that process, and ``kept_answers.py`` keeps its answer::

    config.json -> model_class.py   the class in three sizes: published on meta, narrow, and hollow (no layers)
                -> record.py        one run of it: what each module reads and makes, what is asked of attention
                -> leaves.py        what a module computes: a norm, an activation, a rotation, by its numbers
                -> layer.py         a layer's run -> its LayerSpec
                -> whole.py         the embedding, the head, names and sizes -> the ModelSpec
                -> twin.py          the narrow model's weights in the native decoder: equal logits, or a refusal
"""
