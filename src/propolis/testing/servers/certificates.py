"""Certificates that are valid for loopback only, made on the spot."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


class Certificate:
    """One that vouches for itself; it needs the program openssl."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.file = folder / "certificate.pem"
        self.key = folder / "key.pem"
        listed = ",".join(names or ("DNS:localhost", "IP:127.0.0.1"))
        made = ["req", "-x509", "-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        names_in_it = ["-nodes", "-subj", "/CN=propolis", "-addext", f"subjectAltName={listed}"]
        files = ["-keyout", str(self.key), "-out", str(self.file)]
        subprocess.run(["openssl", *made, *names_in_it, *files], check=True, capture_output=True)

    def for_a_server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self.key)
        return context
