"""List prices of clouds' machines, for the price files of `rlboost plan`.

Azure's come from its Retail Prices API, all others from SkyPilot's catalog, which is derived from the clouds' own price
APIs several times a day. Neither needs an account. Sources:
https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices and
https://github.com/skypilot-org/skypilot-catalog (schema v8).
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import httpx

from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.prices import Prices

CATALOG_URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
AZURE_URL = "https://prices.azure.com/api/retail/prices"
_MACHINE = re.compile(r"([a-z]+)/([\w-]+)/([\w.-]+)(?:\+([\w-]+):([1-9]\d*))?")
_SPOT_KIND = re.compile(r"([^=]+)=([^/]+/[^/]+/[^/]+)(?:/([1-9]\d*))?")
_COLUMNS = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "AvailabilityZone", "Price", "SpotPrice"}
_LARGEST_ANSWER_BYTES = 64 << 20
_MOST_PAGES = 20
_DIGITS = 5


class PriceUnavailable(Retryable):
    """A source of prices did not answer, or not as it documents."""


@dataclass(frozen=True)
class MachineType:
    """A type of machine in a region of a cloud."""

    cloud: str
    region: str
    """A region, or one of its zones."""
    type: str
    gpu: str = ""
    """Type of its GPUs on Google Cloud, whose catalog has the prices of machines without GPUs; else empty."""
    gpus: int = 0

    @classmethod
    def parse(cls, text: str) -> MachineType:
        """Read `CLOUD/REGION/TYPE`, on Google Cloud followed by `+GPU:COUNT`.

        Raises:
            ConfigError: it has another form.

        """
        found = _MACHINE.fullmatch(text)
        if not found or (found[1] == "gcp") != bool(found[4]):
            raise ConfigError(
                f"machine {text!r}: write CLOUD/REGION/TYPE, such as aws/us-east-1/p5.48xlarge; on gcp, and only "
                "there, with its GPUs, such as gcp/us-central1/a3-highgpu-8g+H100:8"
            )
        cloud, region, type_, gpu, gpus = found.groups()
        return cls(cloud, region, type_, gpu or "", int(gpus or 0))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.cloud}/{self.region}/{self.type}" + (f"+{self.gpu}:{self.gpus}" if self.gpu else "")


@dataclass(frozen=True)
class SpotKind:
    """A kind of spot worker, and the machines that run it."""

    kind: str
    machine: MachineType
    workers: int
    """Workers on one machine."""

    @classmethod
    def parse(cls, text: str) -> SpotKind:
        """Read `KIND=MACHINE` or `KIND=MACHINE/WORKERS`.

        Raises:
            ConfigError: it has another form.

        """
        found = _SPOT_KIND.fullmatch(text)
        if not found:
            raise ConfigError(
                f"worker {text!r}: write KIND=CLOUD/REGION/TYPE, with several workers on a machine .../TYPE/WORKERS, "
                "such as h100=aws/us-east-1/p5.48xlarge/8"
            )
        return cls(found[1], MachineType.parse(found[2]), int(found[3] or 1))


class ListPrices:
    """Prices of machines, over HTTP.

    Its methods raise `PriceUnavailable` if a source does not answer as documented, and `ConfigError` if it has no price
    of the machine.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._catalogs: dict[str, list[dict[str, str]]] = {}

    def prices(self, reserved: Sequence[MachineType], spot: Sequence[SpotKind], today: date) -> Prices:
        """Return the on-demand price of the reserved machines together, and the spot price of each kind of worker."""
        if len({one.kind for one in spot}) < len(spot):
            raise ConfigError(f"two workers have the same kind: {', '.join(one.kind for one in spot)}: name each once")
        machines = dict.fromkeys(str(machine) for machine in (*reserved, *(one.machine for one in spot)))
        return Prices(
            as_of=today.isoformat(),
            source=f"list prices of {', '.join(machines)}",
            reserved=round(sum(self.price(one, spot=False) for one in reserved), _DIGITS) if reserved else None,
            workers={one.kind: round(self.price(one.machine, spot=True) / one.workers, _DIGITS) for one in spot},
        )

    def price(self, machine: MachineType, *, spot: bool) -> float:
        """Return dollars per hour in the region's cheapest zone."""
        found = self._of_azure(machine, spot=spot) if machine.cloud == "azure" else self._of_catalog(machine, spot=spot)
        if not found:
            raise ConfigError(
                f"{machine} has no {'spot' if spot else 'on-demand'} price: check the names of the region and the "
                "type, or write the price into the file by hand"
            )
        return min(found)

    def _of_azure(self, machine: MachineType, *, spot: bool) -> list[float]:
        """Return the prices of Linux machines."""
        names = {"armRegionName": machine.region, "armSkuName": machine.type}
        names |= {"serviceName": "Virtual Machines", "priceType": "Consumption"}
        query = {"$filter": " and ".join(f"{name} eq '{value}'" for name, value in names.items())}
        url: str | None = str(httpx.URL(AZURE_URL, params=query))
        found: list[float] = []
        for _ in range(_MOST_PAGES):
            if not url:
                return found
            try:
                page = json.loads(self._get(url))
                found += [float(item["retailPrice"]) for item in page["Items"] if _is_linux(item, spot=spot)]
                url = page["NextPageLink"]
            except (ValueError, KeyError, TypeError) as error:
                raise PriceUnavailable(f"GET {url}: not an answer of Azure's Retail Prices API: {error!r}") from error
        raise PriceUnavailable(f"GET {url}: more than {_MOST_PAGES} pages of prices of one machine")

    def _of_catalog(self, machine: MachineType, *, spot: bool) -> list[float]:
        """Return the price in each zone, on Google Cloud of the machine and its GPUs."""
        rows = [
            row for row in self._catalog(machine.cloud) if machine.region in {row["Region"], row["AvailabilityZone"]}
        ]
        prices = _by_zone((row for row in rows if row["InstanceType"] == machine.type), spot=spot)
        if not machine.gpu:
            return list(prices.values())
        count = str(machine.gpus)
        gpus = _by_zone(
            (
                row
                for row in rows
                if not row["InstanceType"]
                and (row["AcceleratorName"], row["AcceleratorCount"].removesuffix(".0")) == (machine.gpu, count)
            ),
            spot=spot,
        )
        return [prices[zone] + gpus[zone] for zone in prices.keys() & gpus.keys()]

    def _catalog(self, cloud: str) -> list[dict[str, str]]:
        if cloud not in self._catalogs:
            url = f"{CATALOG_URL}/{cloud}/vms.csv"
            reader = csv.DictReader(self._get(url).splitlines(), restval="")
            if not set(reader.fieldnames or ()) >= _COLUMNS:
                raise PriceUnavailable(f"GET {url}: not a catalog of schema v8: its columns are {reader.fieldnames}")
            self._catalogs[cloud] = list(reader)
        return self._catalogs[cloud]

    def _get(self, url: str) -> str:
        """Return the text at a URL."""
        try:
            with self._http.stream("GET", url) as answer:
                if answer.status_code == 404:
                    raise ConfigError(f"GET {url}: not found: prices are known of azure and of SkyPilot's clouds")
                answer.raise_for_status()
                read = bytearray()
                for part in answer.iter_bytes():
                    read += part
                    if len(read) > _LARGEST_ANSWER_BYTES:
                        raise PriceUnavailable(f"GET {url}: the answer is larger than {_LARGEST_ANSWER_BYTES} bytes")
                return read.decode()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeDecodeError) as error:
            raise PriceUnavailable(f"GET {url} failed: {error or type(error).__name__}: try again later") from error


def _is_linux(item: dict[str, Any], *, spot: bool) -> bool:
    """Return True for the hourly price of a machine with Linux, bought as asked."""
    name, product = item["skuName"], item["productName"]
    others = ("Low Priority" in name, "Windows" in product, "Cloud Services" in product, "CloudServices" in product)
    return not any(others) and ("Spot" in name) == spot and item["unitOfMeasure"] == "1 Hour"


def _by_zone(rows: Iterable[dict[str, str]], *, spot: bool) -> dict[str, float]:
    """Return the prices that are known; a catalog without zones has one entry per region."""
    found = {}
    for row in rows:
        text = row["SpotPrice" if spot else "Price"]
        try:
            price = float(text or "nan")
        except ValueError as error:
            raise PriceUnavailable(f"the catalog has the price {text!r} of {row['InstanceType']}") from error
        if math.isfinite(price):
            found[row["AvailabilityZone"] or row["Region"]] = price
    return found
