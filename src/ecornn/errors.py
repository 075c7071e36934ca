"""What the library raises.

Each error also is the built-in type that torch.nn raises for the same mistake, so that code
written against torch.nn catches what it always caught.
"""


class EcornnError(Exception):
    """Base of everything this library raises on purpose."""


class InvalidInput(EcornnError, ValueError, RuntimeError):
    """An argument cannot be served: says which, what came, what was expected, what to do."""

    def __init__(self, argument: str, got: str, expected: str, remedy: str) -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{argument}: got {got}, expected {expected}; {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.argument, self.got, self.expected, self.remedy)


class NoBackend(EcornnError, RuntimeError):
    """No backend can do what was asked; the message lists every refusal."""


class NotDifferentiableTwice(EcornnError, RuntimeError):
    """A second derivative was asked of what has none: the message says what has."""


class KernelGaveUp(EcornnError, RuntimeError):
    """A persistent kernel waited too long for a block that does not run."""
