"""List prices of clouds, from servers that answer as Azure's Retail Prices API and SkyPilot's catalog document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from rlboost import planning
from rlboost.cli import app
from rlboost.shared.prices import read_prices

AWS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
p5.48xlarge,H100,8.0,192.0,2048.0,"{'Gpus': [{'Name': 'H100', 'Count': 8.0}]}",55.04,22.5,us-east-1,use1-az4,x86_64
p5.48xlarge,H100,8.0,192.0,2048.0,"{'Gpus': [{'Name': 'H100', 'Count': 8.0}]}",55.04,20.0,us-east-1,use1-az6,x86_64
p5.48xlarge,H100,8.0,192.0,2048.0,"{'Gpus': [{'Name': 'H100', 'Count': 8.0}]}",58.0,,eu-west-9,euw9-az1,x86_64
"""
GCP = """\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,9.5,3.0
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-b,9.5,1.0
,,,H100,8.0,"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 81920}}]}",us-central1,us-central1-a,78.5,17.0
,,,H100,4.0,"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 81920}}]}",us-central1,us-central1-a,39.25,8.5
"""


def item(sku: str, price: float, product: str = "Virtual Machines NDsr H100 v5 Series") -> dict[str, Any]:
    return {
        "currencyCode": "USD", "tierMinimumUnits": 0.0, "retailPrice": price, "unitPrice": price,
        "armRegionName": "eastus", "location": "US East", "effectiveStartDate": "2026-01-01T00:00:00Z",
        "meterId": "m", "meterName": sku, "productId": "p", "skuId": "s", "productName": product, "skuName": sku,
        "serviceName": "Virtual Machines", "serviceId": "v", "serviceFamily": "Compute", "unitOfMeasure": "1 Hour",
        "type": "Consumption", "isPrimaryMeterRegion": True, "armSkuName": "Standard_ND96isr_H100_v5",
    }  # fmt: skip


AZURE = [
    [item("ND96isrH100v5", 98.32), item("ND96isrH100v5 Low Priority", 19.6)],
    [
        item("ND96isrH100v5 Spot", 30.0, "Virtual Machines NDsr H100 v5 Series Windows"),
        item("ND96isrH100v5 Spot", 29.0, "NDsr H100 v5 Series Cloud Services"),
        item("ND96isrH100v5 Spot", 32.0),
    ],
]
"""Two pages."""


class PriceServer:
    """Both sources on one port; `answers` are bodies by path that replace theirs."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | int] = {"/aws/vms.csv": AWS.encode(), "/gcp/vms.csv": GCP.encode()}
        self.filters: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, path: str, query: dict[str, list[str]]) -> bytes | int:
        if path != "/azure" or path in self.answers:
            return self.answers.get(path, 404)
        self.filters += query["$filter"]
        page = int(query.get("$skip", ["0"])[0])
        next_page = f"{self.url}/azure?$filter=x&$skip={page + 1}" if page + 1 < len(AZURE) else None
        known = "armSkuName eq 'Standard_ND96isr_H100_v5'" in self.filters[0]
        answer = {
            "BillingCurrency": "USD",
            "Items": AZURE[page] if known else [],
            "NextPageLink": next_page,
            "Count": 2,
        }
        return json.dumps(answer).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        get = self.get

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                answer = get(url.path, parse_qs(url.query))
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                self.wfile.write(b"" if isinstance(answer, int) else answer)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceServer]:
    server = PriceServer()
    monkeypatch.setattr(planning, "CATALOG_URL", server.url)
    monkeypatch.setattr(planning, "AZURE_URL", f"{server.url}/azure")
    yield server
    server.stop()


def prices(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["prices", *arguments])


def test_prices_writes_a_price_file_of_three_clouds(server: PriceServer, tmp_path: Path) -> None:
    out = tmp_path / "prices.yaml"
    out.write_text("an older list")
    machines = {
        "aws-h100": "aws/us-east-1/p5.48xlarge/8",
        "gcp-h100": "gcp/us-central1/a3-highgpu-8g+H100:8/8",
        "azure-h100": "azure/eastus/Standard_ND96isr_H100_v5/4",
        "zone": "aws/use1-az4/p5.48xlarge",
    }
    reserved = ("--reserved", "azure/eastus/Standard_ND96isr_H100_v5", "--reserved", "aws/us-east-1/p5.48xlarge")
    workers = [f"--worker={kind}={machine}" for kind, machine in machines.items()]
    done = prices(*workers, *reserved, "--out", str(out))
    assert done.exit_code == 0, done.output
    found = read_prices(out)
    assert found.reserved == 153.36
    assert found.workers == {"aws-h100": 2.5, "gcp-h100": 2.5, "azure-h100": 8.0, "zone": 22.5}
    assert "gcp/us-central1/a3-highgpu-8g+H100:8" in found.source
    assert found.as_of
    shown = prices(*workers, *reserved, "--json")
    assert json.loads(shown.stdout) == found.model_dump(exclude_none=True)
    for part in ("armRegionName eq 'eastus'", "serviceName eq 'Virtual Machines'", "priceType eq 'Consumption'"):
        assert part in server.filters[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "prices of what"),
        (["--worker", "h100"], "worker 'h100': write KIND="),
        (["--reserved", "aws/us-east-1"], "machine 'aws/us-east-1': write CLOUD/REGION/TYPE"),
        (["--reserved", "azure/eastus/x' or 'a' eq 'a"], "write CLOUD/REGION/TYPE"),
        (["--reserved", "gcp/us-central1/a3-highgpu-8g"], "with its GPUs"),
        (["--reserved", "aws/us-east-1/p5.48xlarge+H100:8"], "with its GPUs"),
        (["--worker", "a=aws/us-east-1/p5.48xlarge", "--worker", "a=aws/us-east-1/p5.48xlarge"], "the same kind"),
        (["--reserved", "aws/us-east-1/p6"], "aws/us-east-1/p6 has no on-demand price"),
        (["--worker", "a=aws/eu-west-9/p5.48xlarge"], "p5.48xlarge has no spot price"),
        (["--reserved", "gcp/us-central1/a3-highgpu-8g+H100:2"], "has no on-demand price"),
        (["--reserved", "azure/eastus/Standard_D2"], "has no on-demand price"),
        (["--reserved", "nimbus/eastus/large"], "/nimbus/vms.csv: not found"),
    ],
)
def test_prices_without_such_a_machine_fails(server: PriceServer, arguments: list[str], text: str) -> None:
    done = prices(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize(
    ("path", "answer", "text"),
    [
        ("/aws/vms.csv", b"<html>", "not a catalog of schema v8"),
        ("/aws/vms.csv", AWS.replace("55.04", "much").encode(), "has the price 'much'"),
        ("/aws/vms.csv", b"\xff\xfe", "failed"),
        ("/aws/vms.csv", 503, "503"),
        ("/azure", b"[]", "not an answer of Azure's"),
        ("/azure", 429, "429"),
    ],
)
def test_prices_of_a_source_that_fails_names_it(
    server: PriceServer, tmp_path: Path, path: str, answer: bytes | int, text: str
) -> None:
    server.answers[path] = answer
    machine = "azure/eastus/Standard_ND96isr_H100_v5" if path == "/azure" else "aws/us-east-1/p5.48xlarge"
    done = prices("--reserved", machine, "--out", str(tmp_path / "out.yaml"))
    assert done.exit_code == 1
    assert text in done.stderr
    assert not (tmp_path / "out.yaml").exists()


def test_prices_of_an_endless_answer_stops(server: PriceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_LARGEST_ANSWER_BYTES", 100)
    assert "larger than 100 bytes" in prices("--reserved", "aws/us-east-1/p5.48xlarge").stderr
    monkeypatch.setattr(planning, "_MOST_PAGES", 1)
    monkeypatch.setattr(planning, "_LARGEST_ANSWER_BYTES", 1 << 20)
    assert "more than 1 pages" in prices("--reserved", "azure/eastus/Standard_ND96isr_H100_v5").stderr
