"""``tp-engine eval``: does a model still answer as many questions right as it must?"""
