"""Who may talk to whom: a run's shared token and its certificates, for the Lighthouse and everything beside it.

One :class:`Security` per process, read from the environment (and, in ``torchft_plus``, from the run file's ``[security]``):

- *token*: a shared secret. It keeps out other runs, old processes and port scanners. Without TLS it can be read on the wire.
- *TLS*: mutual. Whoever calls and whoever is called shows a certificate of the run's authority (CA). Addresses of a run
  change with every restart, so no certificate can name them: the called one must carry the fixed name ``tls_name`` instead.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOKEN_VARIABLE = "TORCHFT_PLUS_TOKEN"
VARIABLES = {
    "token_file": "TORCHFT_PLUS_TOKEN_FILE",
    "tls_cert": "TORCHFT_PLUS_TLS_CERT",
    "tls_key": "TORCHFT_PLUS_TLS_KEY",
    "tls_ca": "TORCHFT_PLUS_TLS_CA",
    "tls_name": "TORCHFT_PLUS_TLS_NAME",
}
"""Environment variable of each key of ``[security]``; the variable goes before the key."""
DEFAULT_NAME = "torchft-plus"
HANDSHAKE_DEADLINE_S = 5.0
"""A caller that says nothing, or never ends its handshake, is cut off after this."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_SCHEME = "Bearer "

WRONG_TOKEN = (
    "the token is missing or wrong: give every process of the run the same "
    f"{TOKEN_VARIABLE} or {VARIABLES['token_file']} (security.token_file in the run file)"
)
_SAME_TLS = (
    f"give every process of the run {VARIABLES['tls_cert']}, {VARIABLES['tls_key']} and {VARIABLES['tls_ca']} "
    "(security.tls_cert, tls_key and tls_ca in the run file), or none of them"
)
SPEAKS_TLS = f"the other side wants TLS, and this one has no certificate: {_SAME_TLS}"
NO_TLS_ALERT = bytes([21, 3, 1, 0, 2, 2, 70])
"""A TLS record, fatal `protocol_version`: what a side says to one whose first words it cannot be talked to with."""
TLS_ALERT, TLS_HANDSHAKE = 21, 22
"""First byte of what a TLS speaker sends first."""
SPEAKS_NO_TLS = f"this side has a certificate, and the other speaks no TLS: {_SAME_TLS}"


class SecurityError(ValueError):
    """A security setting is missing, wrong or readable by everybody; the sentence names it and the mend."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a process: its certificate (with intermediates) and key, and the run's authority; PEM."""

    certificate: Path
    key: Path
    authority: Path
    name: str = DEFAULT_NAME
    """Every certificate carries it as a DNS name (subjectAltName)."""


@dataclass(frozen=True, slots=True)
class Security:
    """What a process shows, and what it asks of others. Without arguments: nothing."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @classmethod
    def resolve(
        cls, environment: Mapping[str, str] | None = None, table: Mapping[str, str] | None = None
    ) -> Security:
        """Read it from ``environment`` (default: the process's) and, where that says nothing, from ``table``.

        Args:
            table: the run file's ``[security]``: keys of ``VARIABLES``; an empty string is the same as no key.

        Raises:
            SecurityError: a file is missing, malformed or readable by everybody, or only part of TLS is set.
        """
        env = os.environ if environment is None else environment
        settings = {key: _setting(key, env, table or {}) for key in VARIABLES}
        token = env.get(TOKEN_VARIABLE, "").strip()
        if token and env.get(VARIABLES["token_file"]):
            raise SecurityError(
                f"{TOKEN_VARIABLE} and {VARIABLES['token_file']} are both set: set one of them"
            )
        where = TOKEN_VARIABLE
        if not token and settings["token_file"][1]:
            where, path = settings["token_file"]
            token = _read_secret(Path(path), where).strip()
            if not token:
                raise SecurityError(
                    f"{where}: {path} is empty: write the token into it (openssl rand -hex 32)"
                )
        if token and not _TOKEN.fullmatch(token):
            raise SecurityError(
                f"{where} holds no token: 16 to 512 letters, digits or ._~+/=- are one (openssl rand -hex 32)"
            )
        return cls(token, _resolve_tls(settings))

    def environment(self) -> dict[str, str]:
        """The variables that give a child the same."""
        found = {TOKEN_VARIABLE: self.token} if self.token else {}
        if self.tls is not None:
            values = (self.tls.certificate, self.tls.key, self.tls.authority, self.tls.name)
            keys = ("tls_cert", "tls_key", "tls_ca", "tls_name")
            found |= {VARIABLES[key]: str(value) for key, value in zip(keys, values, strict=True)}
        return found

    @property
    def guarded(self) -> bool:
        """Not everybody who reaches a port of this process is served."""
        return bool(self.token) or self.tls is not None

    @property
    def authorization(self) -> str:
        """The value of an ``authorization`` header; empty without a token."""
        return _SCHEME + self.token if self.token else ""

    def accepts(self, token: str) -> bool:
        """True if ``token`` is the run's, or none is asked for. Takes as long for every wrong one."""
        return not self.token or hmac.compare_digest(token.encode(), self.token.encode())

    def authorizes(self, header: str | None) -> bool:
        """``accepts`` for the value of an ``authorization`` header."""
        header = header or ""
        scheme, token = header[: len(_SCHEME)], header[len(_SCHEME) :]
        return self.accepts(token if scheme.lower() == _SCHEME.lower() else "")

    def describe(self) -> str:
        """Which of the two are on, for logs."""
        token = "token" if self.token else "no token"
        return f"{token}, {'TLS' if self.tls is not None else 'no TLS'}"


def without_security(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without any variable that a ``Security`` is read from."""
    names = {TOKEN_VARIABLE, *VARIABLES.values()}
    return {name: value for name, value in environment.items() if name not in names}


@functools.lru_cache
def server_context(tls: Tls) -> ssl.SSLContext:
    """For whoever is called: asks the caller for a certificate of the authority. TLS 1.2 or newer."""
    return fill_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls)


@functools.lru_cache
def client_context(tls: Tls) -> ssl.SSLContext:
    """For whoever calls: the called one must show ``tls.name`` (give it as ``server_hostname``). TLS 1.2 or newer."""
    return fill_context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)


def fill_context(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    """Give a context its files and what is asked of the other side."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.authority)
    context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # never ask a terminal
    return context


def is_mismatch(error: BaseException | None) -> bool:
    """True if trying again cannot help. A side that just died in the middle of a handshake is no mismatch."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def describe_tls_error(error: ssl.SSLError) -> str:
    """One sentence about a failed handshake."""
    reason = (error.reason or "").upper()
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the other side is not accepted ({error.verify_message}): it must come from the authority in "
            f"{VARIABLES['tls_ca']} and carry the name of {VARIABLES['tls_name']} (default: {DEFAULT_NAME})"
        )
    if reason in (
        "WRONG_VERSION_NUMBER",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "HTTP_REQUEST",
        "HTTPS_PROXY_REQUEST",
    ):
        return SPEAKS_NO_TLS
    if "ALERT" in reason or "CERTIFICATE" in reason:
        words = reason.lower().replace("_", " ")
        return (
            f"a certificate is missing or not accepted ({words}): the one in {VARIABLES['tls_cert']} must come "
            f"from the authority that the other side has in {VARIABLES['tls_ca']}"
        )
    return f"no TLS connection came about: {error.reason or error}"


def _setting(key: str, environment: Mapping[str, str], table: Mapping[str, str]) -> tuple[str, str]:
    """(name for sentences, value)."""
    variable = VARIABLES[key]
    value = environment.get(variable, "")
    return (variable, value) if value else (f"security.{key}", table.get(key, ""))


def _resolve_tls(settings: Mapping[str, tuple[str, str]]) -> Tls | None:
    names = ("tls_cert", "tls_key", "tls_ca")
    missing = [settings[name][0] for name in names if not settings[name][1]]
    if len(missing) == len(names):
        return None
    if missing:
        raise SecurityError(
            f"{missing[0]} is missing: TLS needs all of tls_cert, tls_key and tls_ca "
            f"({VARIABLES['tls_cert']}, {VARIABLES['tls_key']}, {VARIABLES['tls_ca']})"
        )
    files = [Path(settings[name][1]).expanduser().absolute() for name in names]
    tls = Tls(*files, name=settings["tls_name"][1] or DEFAULT_NAME)
    for name, path in zip(names, files, strict=True):
        _read(path, settings[name][0])
    _refuse_open_file(tls.key, settings["tls_key"][0])
    for where, make in (("as a server", server_context), ("as a client", client_context)):
        try:
            make(tls)
        except (ssl.SSLError, OSError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error
            raise SecurityError(
                f"{settings['tls_cert'][0]}, {settings['tls_key'][0]} and {settings['tls_ca'][0]} do not work {where} "
                f"({reason}): they must be PEM files, and the key, without a password, that of the certificate"
            ) from error
    return tls


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise SecurityError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SecurityError(f"{name}: {path} is no text file") from None


def _read_secret(path: Path, name: str) -> str:
    path = path.expanduser()
    text = _read(path, name)
    _refuse_open_file(path, name)
    return text


def _refuse_open_file(path: Path, name: str) -> None:
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SecurityError(
            f"{name}: {path} can be read or written by every user of this machine: chmod 600 it"
        )
