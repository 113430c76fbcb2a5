"""Which requests a file sender responds to itself."""

from __future__ import annotations

import pytest

from rlboost.shared.http.transfer_server import TransferRequest, parse

PLAIN = b"GET /v1/chunks/ab HTTP/1.1\r\nHost: store\r\nauthorization:  Bearer t \r\nX-Forwarded-For: 10.0.0.1\r\n\r\n"


def test_parse_returns_path_and_credential_of_a_plain_download() -> None:
    assert parse(PLAIN) == TransferRequest("/v1/chunks/ab", "Bearer t")
    assert parse(b"GET / HTTP/1.1\r\n\r\n") == TransferRequest("/", "")


@pytest.mark.parametrize(
    "request_",
    [
        PLAIN.replace(b"GET", b"HEAD"),
        PLAIN.replace(b"GET", b"PUT"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"Host", b"Range"),
        PLAIN.replace(b"Host", b"If-Match"),
        PLAIN.replace(b"Host", b"Content-Length"),
        PLAIN.replace(b"Host", b"TRANSFER-ENCODING"),
        PLAIN.replace(b"Host", b"Expect"),
        PLAIN.replace(b"Host: store", b"Connection: close"),
        PLAIN.replace(b"Host", b"Authorization"),
        PLAIN.replace(b"Host: store", b" folded: store"),
        PLAIN.replace(b"Host: store", b"no colon"),
        PLAIN.replace(b"\r\n", b"\n"),
        PLAIN.replace(b"store", b"s" * (16 << 10)),
        PLAIN + PLAIN,
        PLAIN[:-2],
        b"",
    ],
)
def test_parse_leaves_any_other_request_to_the_app(request_: bytes) -> None:
    assert parse(request_) is None


UPLOAD = PLAIN.replace(b"GET", b"PUT").replace(b"Host: store", b"Content-Length: 12")


def test_parse_returns_the_size_of_a_plain_upload() -> None:
    for received in (b"", b"a part", b"twelve bytes"):
        assert parse(UPLOAD + received) == TransferRequest("/v1/chunks/ab", "Bearer t", 12)


@pytest.mark.parametrize(
    "request_",
    [
        UPLOAD + b"thirteen byte",
        UPLOAD.replace(b"12", b"-1"),
        UPLOAD.replace(b"12", b"1_2"),
        UPLOAD.replace(b"12", "\u00b2".encode("latin-1")),
        UPLOAD.replace(b"12", b""),
        UPLOAD.replace(b"12", b"12\r\nContent-Length: 12"),
        UPLOAD.replace(b"12", b"12\r\nTransfer-Encoding: chunked"),
        UPLOAD.replace(b"12", b"12\r\nExpect: 100-continue"),
        UPLOAD.replace(b"12", b"12\r\nContent-Range: bytes 0-11/24"),
        UPLOAD.replace(b"12", b"12\r\nContent-Encoding: gzip"),
    ],
)
def test_parse_leaves_any_other_upload_to_the_app(request_: bytes) -> None:
    assert parse(request_) is None
