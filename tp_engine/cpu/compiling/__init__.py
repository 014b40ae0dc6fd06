"""How the C sources become a library: compiled into the wheel for a few levels of processors, or on this machine.

::

    levels.py      the levels, and which one a processor has
    gcc.py         one level, compiled
    shipped.py     built/ beside this folder: what a wheel brings
    cache.py       the user's cache folder: what this machine has compiled
    __main__.py    ``python -m tp_engine.cpu.compiling``, when an environment is made

Nothing here imports more than the standard library: setup.py runs it before anything is installed.
"""
