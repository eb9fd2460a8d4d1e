"""The exception of a failed translation."""


class TranslationError(Exception):
    """Raised for PTX that the emulator does not know. Names the file, the line and the text."""

    def __init__(self, message, line=None, text=""):
        self.message, self.line, self.text = message, line, text
        super().__init__(message)

    def located(self, path):
        place = f"{path}:{self.line}" if self.line else str(path)
        return f"{place}: {self.message}" + (f": {self.text}" if self.text else "")
