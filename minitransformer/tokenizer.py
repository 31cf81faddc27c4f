"""Text to ids and back with the checkpoint's own tokenizer.json; nothing is added unless it is asked for."""

import os
from collections.abc import Sequence
from pathlib import Path

from minitransformer.errors import InputError

# What belongs to a tokenizer in a Hugging Face directory; copied unchanged when a model is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Tokenizer:
    """A tokenizers.Tokenizer and the files it came from (name -> bytes), so that a saved model keeps them."""

    def __init__(self, files: dict[str, bytes], where: str = "tokenizer.json") -> None:
        from tokenizers import Tokenizer as Backend

        self.files = files
        try:
            self._backend = Backend.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises a bare Exception, whatever is wrong with the file
            raise InputError(f"{where}: not a tokenizer ({str(error)[:80]}); download it again") from None
        self._as_written()

    def _as_written(self) -> None:
        # Files in the wild ask for truncation or padding; a prompt is never shortened or lengthened in silence.
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = False, where: str = "the text") -> list[int]:
        """Ids of a text; special tokens written out in the text (ChatML) are recognised.

        where: names the text in the InputError for half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise InputError(f"{where}: {half} is half of a surrogate pair, not a character; remove it") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def load_tokenizer(directory: str | os.PathLike, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None without tokenizer.json.

    InputError when the file is malformed, or gives ids that a model of vocab_size rows does not have.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    for name in TOKENIZER_FILES:
        # A directory or a broken link is not the same as no tokenizer.
        if os.path.lexists(directory / name) and not (directory / name).is_file():
            raise InputError(f"{directory / name}: is not a file; download it again")
    if not path.is_file():
        return None
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    tokenizer = Tokenizer(files, str(path))
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{path}: has ids up to {tokenizer.vocab_size - 1}, but the model's vocab_size is {vocab_size}; it belongs "
            "to another model"
        )
    return tokenizer
