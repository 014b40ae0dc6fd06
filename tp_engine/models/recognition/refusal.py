"""Why a class cannot be described."""


class RefusalError(Exception):
    """What the class does that the native layers have no description of; the text follows "it is not served: "."""
