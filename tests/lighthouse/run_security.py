"""Certificates and tokens for tests: a run's authority, and a stranger's."""

from __future__ import annotations

from pathlib import Path

import trustme

from lighthouse.security import DEFAULT_NAME, Security, Tls

TOKEN = "a-token-for-tests-0123456789"
OTHER_TOKEN = "another-token-for-tests-0123"


def make_tls(folder: Path, name: str = DEFAULT_NAME) -> Tls:
    """A new authority and one certificate of it."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    certificate = authority.issue_cert(name)
    paths = [folder / f"{what}.pem" for what in ("cert", "key", "ca")]
    certificate.cert_chain_pems[0].write_to_path(str(paths[0]))
    certificate.private_key_pem.write_to_path(str(paths[1]))
    authority.cert_pem.write_to_path(str(paths[2]))
    paths[1].chmod(0o600)
    return Tls(*paths, name=DEFAULT_NAME)


def mixed(certificate_of: Tls, authority_of: Tls) -> Tls:
    """Trusts one authority, shows a certificate of another."""
    return Tls(certificate_of.certificate, certificate_of.key, authority_of.authority, authority_of.name)


def make_security(folder: Path, token: str = TOKEN) -> Security:
    return Security(token, make_tls(folder))
