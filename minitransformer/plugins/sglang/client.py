"""Talks to an SGLang server over HTTP: standard library only, ids in, ids and log-probs out."""

import copy
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minitransformer.errors import InputError
from minitransformer.plugins.sglang.identity import PREFIX, read_identity

LONGEST = 1e6  # seconds; a socket takes no infinity
QUICK = 30  # seconds, of a question that a server answers at once
UNKNOWN_ACTION = "Unsupported action"  # SGLang's own answer to a question that only our model knows
NO_SUCH_PAGE = (404, 405)  # other codes are of a server that has it: a key is missing, it is in trouble
UNREADABLE = "the answer is not SGLang's; is the URL that of an SGLang server?"


@dataclass(frozen=True)
class Output:
    """One request's answer. prompt_log_probs[i] is that of prompt token first + i + 1, at temperature 1.

    cached_tokens: of the prompt, from the radix cache. experts: int ids [tokens, layers, K], if they were asked for.
    """

    token_ids: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float]
    cached_tokens: int
    finish_reason: str
    meta: dict[str, Any]


def checked(url: str) -> str:
    """The URL without a slash at its end. InputError unless it is http://host[:port][/path], or https."""

    def no(why: str) -> InputError:
        return InputError(f"{url.rpartition('@')[2]!r} is no URL ({why}); expected http://host:port")

    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise no(str(error)) from None
    if any(c.isspace() or not c.isprintable() for c in url):
        raise no("it has a space or a control character")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise no("its scheme is not http" if parts.scheme not in ("http", "https") else "it names no host and port")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise no("it has more than a host, a port and a path")
    return url.rstrip("/")


def _patience(timeout: float) -> float:
    if not 0 < timeout <= LONGEST:
        raise InputError(f"timeout {timeout:g}: give seconds, more than 0 and at most {LONGEST:g}")
    return timeout


class Refused(InputError):
    """The server answers with an HTTP error, of this code."""

    def __init__(self, code: int, said: str) -> None:
        self.code = code
        super().__init__(said)


class Client:
    """url: 'http://host:port'; timeout: seconds of one answer. Raises InputError for a server that does not answer."""

    def __init__(self, url: str, timeout: float = 600) -> None:
        self.url, self.timeout = checked(url), _patience(timeout)

    def within(self, timeout: float) -> "Client":
        """A client of the same server, with another timeout."""
        other = copy.copy(self)
        other.timeout = _patience(timeout)
        return other

    def call(self, path: str, body: Any = None) -> Any:
        """GET, or POST of JSON -> the answer: of JSON, or text. InputError names the server's state."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with _opener(self.url).open(request, timeout=self.timeout) as answer:
                content, kind = answer.read(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            said = _message(_body(error))
            raise Refused(error.code, f"{self.url}{path}: the server refuses ({error.code}): {said:.500}") from None
        except TimeoutError:
            late = f"no answer within {self.timeout:g} s; the server may still be at it"
            raise InputError(f"{self.url}{path}: {late}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a host that can't be encoded
            reason = getattr(error, "reason", error)
            raise InputError(f"{self.url}{path}: no server answers ({reason!s:.200}); is it running?") from None
        try:
            return json.loads(content) if "json" in kind and content else content.decode("utf-8", "replace")
        except ValueError as error:
            raise InputError(f"{self.url}{path}: {UNREADABLE} (no JSON: {error})") from None

    def flush_cache(self) -> None:
        """Empties the radix cache once no request is in flight. InputError if that takes 30 s."""
        self.call("/flush_cache?timeout=30", {})

    def is_up(self) -> bool:
        try:
            self.call("/health")
        except InputError:
            return False
        return True

    def about(self) -> dict[str, Any]:
        """/server_info: version, model_path, ... InputError if this is no SGLang server, or it refuses to tell."""
        try:
            found = self.call("/server_info")
        except Refused as error:
            if error.code not in NO_SUCH_PAGE:
                raise
            found = None
        if not isinstance(found, dict) or "version" not in found:
            raise InputError(f"{self.url}: something answers, but it is no SGLang server; give the URL of one")
        return found

    def identity(self) -> dict[str, Any] | None:
        """What a server with our model says of itself (identity.py); None: it runs SGLang's own model.

        InputError for any other refusal: that of a missing key, or of a server in trouble, tells nothing of the model.
        """
        try:
            return read_identity(self._checker("identity"))
        except Refused as error:
            if error.code == 404 or (error.code == 400 and UNKNOWN_ACTION in str(error)):
                return None
            raise

    def checksums(self) -> dict[str, str]:
        """Name -> checksum of every tensor, as checksums.checksums gives them for a model here."""
        return {name: value for name, value in self._checker("checksum").items() if not name.startswith(PREFIX)}

    def _checker(self, action: str) -> dict[str, str]:
        answer = self.call("/weights_checker", {"action": action})
        with self._reading("/weights_checker"):
            return dict(answer["ranks"][0]["checksums"])

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """InputError for an answer without the fields of SGLang's."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{self.url}{path}: {UNREADABLE} ({type(error).__name__}: {error})") from None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: dict[str, Any] | Sequence[dict[str, Any]],
        first: int = 0,
        **more: Any,
    ) -> list[Output]:
        """One request of SGLang's /generate for all prompts. params: SGLang's sampling_params, one or one a prompt.

        first: the prompt position after which prompt tokens are scored; a server with a radix cache reuses only what
        lies before it, so -1 (nothing of the prompt) lets it reuse all.
        """
        body = {
            "input_ids": [list(p) for p in prompts], "sampling_params": params, "return_logprob": True,
            "logprob_start_len": first, **more,
        }  # fmt: skip
        answers = self.call("/generate", body)
        with self._reading("/generate"):
            found = [_output(a) for a in (answers if isinstance(answers, list) else [answers])]
            if len(found) != len(prompts):
                raise ValueError(f"{len(found)} answers to {len(prompts)} prompts")
            return found


def _opener(url: str) -> urllib.request.OpenerDirector:
    """The environment's proxies, but none to this machine: a proxy would look for the server on its own."""
    host = urllib.parse.urlsplit(url).hostname
    here = host == "localhost" or host == "::1" or host.startswith("127.")
    return _opener_for(() if here else tuple(sorted(urllib.request.getproxies().items())))


@lru_cache
def _opener_for(proxies: tuple[tuple[str, str], ...]) -> urllib.request.OpenerDirector:
    """Kept: since Python 3.12 making one reads all certificates of the system, for 15 ms and more."""
    return urllib.request.build_opener(urllib.request.ProxyHandler(dict(proxies)))


def _body(error: urllib.error.HTTPError) -> str:
    """Of an answer that may end too early, or not come."""
    try:
        return error.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return "and breaks off before it says why"


def _message(body: str) -> str:
    """What SGLang's JSON of an error says, on one line; the body as it is if it is another's."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        return " ".join(str(found["message"]).split())
    except (AttributeError, LookupError, TypeError, ValueError):
        return body


def _output(answer: dict[str, Any]) -> Output:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason") or {}
    return Output(
        token_ids=answer["output_ids"],
        log_probs=[x[0] for x in meta["output_token_logprobs"]],
        prompt_log_probs=[x[0] for x in meta.get("input_token_logprobs") or [] if x[0] is not None],
        cached_tokens=meta.get("cached_tokens", 0),
        finish_reason=reason.get("type", ""),
        meta=meta,
    )
