"""From what huggingface_hub raises to the sentence that users read, and what is worth a retry."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..checkpoint.errors import PushError
from ..checkpoint.hub import chain, class_names, redact, sentence, status_code

T = TypeVar("T")

NOT_STORED = (
    "the storage of {endpoint} did not take the files ({error}): run this again, what arrived is"
    " not sent twice; HF_HUB_DISABLE_XET=1 sends them over LFS instead"
)
"""Of hf_xet, which also raises Python's own ConnectionError."""

MESSAGES = {
    "OfflineModeIsEnabled": (
        "HF_HUB_OFFLINE forbids the Hub, and a push needs it: unset it and run this again"
    ),
    "LocalTokenNotFoundError": (
        "no token for {endpoint}: run `hf auth login` with one that may write, or set HF_TOKEN"
    ),
    "GatedRepoError": (
        "{id} is gated and your account has no access: accept its terms at {url}, or push to a"
        " repository of your own"
    ),
    "DisabledRepoError": "{id} was disabled on the Hub: {url} says why",
    "RevisionNotFoundError": (
        "{id} has no branch {branch}: name one of {url}/tree/main, or leave out --branch"
    ),
    "RepositoryNotFoundError": (
        "{id} is not there, or is private and your account may not see it: check the name at"
        " {url}, and with `hf auth whoami` whose token is in use"
    ),
    "HfHubHTTPError 401": (
        "the Hub refused your token: renew it with `hf auth login`, and unset HF_TOKEN if an old"
        " one is there"
    ),
    "HfHubHTTPError 402": (
        "the Hub wants payment for {id}{said}: see {endpoint}/settings/billing, or push with"
        " --public, which has other limits"
    ),
    "HfHubHTTPError 403": (
        "your token may not write to {id}{said}: give it write access at"
        " {endpoint}/settings/tokens, then run `hf auth login` and this again"
    ),
    "HfHubHTTPError 404": (
        "{endpoint} does not know what a push asks of it{said}: check HF_ENDPOINT and the proxy"
    ),
    "JSONDecodeError": "{endpoint} does not answer as a Hub: check HF_ENDPOINT and the proxy",
    "HfHubHTTPError 409": (
        "{id} is being changed by somebody else{said}: look at {url}/commits/{branch} and run this"
        " again"
    ),
    "HfHubHTTPError 412": (
        "{id} was changed on {branch} while this ran: look at {url}/commits/{branch} and run this"
        " again"
    ),
    "HfHubHTTPError 413": "the Hub takes no request this large{said}: push with fewer files",
    "HfHubHTTPError 429": (
        "the Hub limits how often you may ask: wait a few minutes and run this again; files that"
        " have arrived are not sent twice"
    ),
    "BadRequestError": "the Hub refused what was sent to {id}{said}",
    "HfHubHTTPError": (
        "the Hub answered {status} for {id}{said}: run this again later; files that have arrived"
        " are not sent twice"
    ),
    "TransportError": (
        "{endpoint} cannot be reached: check the network, proxy and HF_ENDPOINT, then run this"
        " again; files that have arrived are not sent twice"
    ),
    "XetAuthenticationError": (
        "the storage of {endpoint} refused your token for {id}: give it write access at"
        " {endpoint}/settings/tokens, then run `hf auth login` and this again"
    ),
    "XetError": NOT_STORED,
    "ConnectionError": NOT_STORED,
    "ValueError": "{id}: {error}",
}
"""By the class of an error, or one of its bases, and HTTP status."""

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
TRIES = 5
LONGEST_WAIT = 300.0
"""Seconds; a Hub that asks for more is told about instead of waited for."""

_RESET = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*([0-9]+)")
_SECONDS = re.compile(r"[0-9]+")


@contextmanager
def explained(repo: str, branch: str = "main") -> Iterator[None]:
    """Turn what huggingface_hub raises into the `PushError` of `MESSAGES`, if it has one.

    Uploads wrap the real reason in a RuntimeError, so the causes are looked through too.
    """
    try:
        yield
    except PushError:
        raise
    except Exception as error:
        message = next((m for e in chain(error) if (m := _message(e, repo, branch))), None)
        if message is None:
            raise
        raise PushError(f"{message}.") from error


def _message(error: BaseException, repo: str, branch: str) -> str | None:
    from huggingface_hub import constants

    message = sentence(error, MESSAGES)
    said = _short(getattr(error, "server_message", None) or "")
    return message and message.format(
        id=repo,
        branch=branch,
        endpoint=constants.ENDPOINT,
        url=f"{constants.ENDPOINT}/{repo}",
        status=status_code(error),
        said=f' ("{said}")' if said else "",
        error=_short(str(error)),
    )


def _short(text: str) -> str:
    """Foreign words in a sentence of ours: one line, no secret, not endless."""
    said = " ".join(redact(text).split()).rstrip(".")
    return said if len(said) <= 200 else f"{said[:200]}..."


def pause(error: BaseException, attempt: int) -> float | None:
    """Seconds to wait before the next try; None where another one makes no sense.

    429 and 5xx wait as long as the Hub says (`Retry-After`, or the end of its rate window), else
    1, 2, 4, 8 seconds; so does a broken connection. Everything else is final, above all 401, 403
    and 404.
    """
    if "TransportError" in class_names(error):
        return float(2**attempt)
    if status_code(error) not in RETRIED:
        return None
    headers = getattr(error, "response").headers  # noqa: B009 - any class that has a status
    asked = headers.get("Retry-After", "")
    window = _RESET.search(headers.get("RateLimit", "")) if status_code(error) == 429 else None
    wait = float(window[1] if window else asked if _SECONDS.fullmatch(asked) else 2**attempt)
    return wait if wait <= LONGEST_WAIT else None


def patiently(call: Callable[[], T], *, tell: Callable[[str], None]) -> T:
    """The result of `call`, tried up to `TRIES` times as `pause` says; raises its last error.

    For the calls that huggingface_hub does not repeat itself: account, repository, settings,
    commit. `tell` gets a sentence before each wait.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except Exception as error:
            wait = pause(error, attempt)
            if wait is None or attempt == TRIES - 1:
                raise
            tell(_waiting(error, wait))
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _waiting(error: BaseException, wait: float) -> str:
    status = status_code(error)
    reason = f"the Hub answered {status}" if status else "the connection broke"
    return f"{reason}; next try in {wait:g} s."
