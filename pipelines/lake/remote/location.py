"""Locations in object stores: "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix".

Of S3, a location may end with "?endpoint_override=http://host:port&region=...&scheme=http"; the defaults are the usual
environment variables AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION. A location never contains
credentials: they come from the environment, a profile or the machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pipelines import trust
from pipelines.config.lakes import STORES
from pipelines.errors import UsageError

_OPTIONS = {"s3": ("endpoint_override", "region", "scheme")}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LOCATION = re.compile(rf"(?P<scheme>{'|'.join(STORES)})://(?P<bucket>[\w.\-]+)(?:/(?P<prefix>.*))?", re.DOTALL)
_BAD_PART = re.compile(r"\.{0,2}|.*[\x00-\x1f\x7f#].*", re.DOTALL)  # empty, ".", "..", or with such characters


@dataclass(frozen=True, kw_only=True)
class Location:
    """A bucket and a prefix ("" or "a/b"); `options` as given, for the text of the location."""

    scheme: str = "s3"
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse a location. UsageError if `text` is not one; InputMissing if it names a host that the user did not."""
        body, _, query = text.partition("?")
        shown = unquote(text)
        found = _LOCATION.fullmatch(body)
        prefix = (found["prefix"] or "").strip("/") if found else ""
        if found is None or any(_BAD_PART.fullmatch(part) for part in prefix.split("/") if prefix):
            hint = f"leave credentials to {_CREDENTIALS['s3']}" if "@" in body else None
            raise UsageError(f"'{shown}' is not a location: s3://bucket/prefix, gs://... or az://...", hint=hint)
        scheme = found["scheme"]
        options = dict(parse_qsl(query, keep_blank_values=True))
        known = _OPTIONS.get(scheme, ())
        unknown = sorted(options.keys() - set(known))
        if unknown:
            hint = f"there are {', '.join(known)}" if known else f"{scheme}:// has no options"
            raise UsageError(f"location '{shown}': unknown option {', '.join(unknown)}", hint=hint)
        named = options.get("endpoint_override")
        endpoint = named or _environment(*_ENDPOINTS[scheme])
        if endpoint and "@" in endpoint:
            raise UsageError(
                f"the endpoint of '{shown}' contains credentials", hint=f"leave credentials to {_CREDENTIALS[scheme]}"
            )
        if endpoint:
            endpoint = _address(endpoint, options.get("scheme", "https"))
        if named and endpoint != _address(_environment(*_ENDPOINTS[scheme]) or "", "https"):
            trust.require_address(shown, named)
        region = None
        if scheme == "s3":
            region = options.get("region") or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
            region = region or ("us-east-1" if endpoint else None)
        return cls(
            scheme=scheme,
            bucket=found["bucket"],
            prefix=prefix,
            endpoint=endpoint,
            region=region,
            options=tuple(options.items()),
        )

    def __str__(self) -> str:
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in self.options)
        return self.shown() + (f"?{query}" if query else "")

    def shown(self, key: str = "") -> str:
        """Return the location of a file without options."""
        return f"{self.scheme}://" + "/".join(filter(None, (self.bucket, self.prefix, key)))

    def object(self, key: str) -> str:
        """Return the name of a file within its bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def below(self, folder: str) -> Location:
        return replace(self, prefix=self.object(folder))

    @property
    def identity(self) -> str:
        """A text that is equal for locations of the same place."""
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "") if self.scheme == "az" else ""
        return f"{self.endpoint or account} {self.shown()}"

    @property
    def credentials(self) -> str:
        """The names of the variables that give credentials."""
        return _CREDENTIALS[self.scheme]


def _address(text: str, scheme: str) -> str:
    """Return an endpoint with its scheme. UsageError if it is not the address of a host."""
    if not text:
        return ""
    address = text.rstrip("/") if "://" in text else f"{scheme}://{text}".rstrip("/")
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or re.search(r"[^\x21-\x7e]|[\"<>\\^`{|}]", address):
        raise UsageError(f"'{text}' is not the address of a host", hint="give http://HOST:PORT or https://HOST")
    return address


def _environment(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
