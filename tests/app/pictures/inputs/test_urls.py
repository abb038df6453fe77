"""The list of hosts allows exactly what it names, and only addresses of the public internet count as public."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.pictures.inputs.urls import (
    MAX_URL_LENGTH,
    AllowedHost,
    FetchError,
    PictureUrl,
    check_allowed,
    is_public,
)

CASES = yaml.safe_load(Path(__file__).with_name("urls.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "entry", "url"),
    [
        (kind, entry, url)
        for kind in ("allowed", "not allowed")
        for entry, urls in CASES[kind].items()
        for url in urls.split()
    ],
)
def test_an_entry_allows_what_it_names_and_nothing_like_it(kind: str, entry: str, url: str) -> None:
    allowed = [AllowedHost.parse(entry)]
    try:
        check_allowed(PictureUrl.parse(url), allowed=allowed)
    except FetchError:
        assert kind == "not allowed"
    else:
        assert kind == "allowed"


@pytest.mark.parametrize("entry", [*CASES["no entries"].split(), "", "exam ple.com"])
def test_an_entry_that_means_no_host_is_refused_when_it_is_read(entry: str) -> None:
    with pytest.raises(ValueError, match=r"example|port"):
        AllowedHost.parse(entry)


@pytest.mark.parametrize("host", [*CASES["no names of hosts"].split(), "a" * 64 + ".com", ""])
def test_a_url_names_its_host_in_ascii_and_never_by_an_address(host: str) -> None:
    with pytest.raises(FetchError) as caught:
        PictureUrl.parse(f"https://{host}/a.png")
    assert caught.value.code == "invalid_image_url"


@pytest.mark.parametrize("url", [*CASES["no urls"], "https://example.com/" + "a" * MAX_URL_LENGTH])
def test_a_url_that_could_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(FetchError):
        PictureUrl.parse(url)


def test_a_url_keeps_its_path_and_query_and_loses_its_fragment() -> None:
    url = PictureUrl.parse("https://Example.com/a%20b/ü.png?width=3&name=%C3%BC#part")

    assert str(url) == "https://example.com/a%20b/%C3%BC.png?width=3&name=%C3%BC"
    assert url.target.isascii()


@given(st.text(max_size=60))
def test_any_text_is_a_url_that_reads_the_same_again_or_is_refused(text: str) -> None:
    try:
        url = PictureUrl.parse(f"https://example.com/{text}")
    except FetchError:
        return
    assert url.host == "example.com"
    assert PictureUrl.parse(str(url)) == url


@pytest.mark.parametrize("kind", ["public", "not public"])
def test_addresses_of_the_internet_are_public_and_nothing_else(kind: str) -> None:
    for address in (*CASES[kind].split(), *([""] if kind == "not public" else [])):
        assert is_public(address) == (kind == "public"), address
