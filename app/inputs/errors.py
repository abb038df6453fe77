"""What is wrong with an input as a whole. What is wrong with one picture of it is told by that picture's item."""


class InputsError(Exception):
    """A list, manifest or sheet of questions that cannot be used at all; `hint` says what to do, or is empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
