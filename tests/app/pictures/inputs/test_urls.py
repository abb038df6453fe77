"""The list of hosts allows exactly what it names, and only addresses of the public internet count as public."""

import pytest
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


def is_taken(url: str, *entries: str) -> bool:
    try:
        check_allowed(PictureUrl.parse(url), allowed=[AllowedHost.parse(entry) for entry in entries])
    except FetchError:
        return False
    return True


ALLOWED = {
    "example.com": "https://example.com https://EXAMPLE.com:443/a/b.png?width=3",
    "Example.COM": "https://example.com/",
    "https://example.com": "https://example.com/",
    "example.com:8443": "https://example.com:8443/a.png",
    "*.example.com": "https://a.example.com/ https://a.b.example.com/",
    "*.example.com:8443": "https://a.example.com:8443/",
    "http://example.com": "http://example.com/",
    "http://example.com:8080": "http://example.com:8080/",
    "http://*.example.com": "http://a.example.com/",
    "localhost": "https://localhost/",
    "xn--bcher-kva.example": "https://xn--bcher-kva.example/",
}
NOT_ALLOWED = {
    "example.com": "http://example.com/ https://example.com:8443/ https://example.com:80/ https://a.example.com/ "
    "https://example.com.evil.org/ https://evilexample.com/ https://example.com./ https://example.com@evil.org/ "
    "https://evil.org/example.com https://evil.org?example.com https://evil.org#@example.com/ "
    "https://evil.org\\@example.com/ https:example.com https:///example.com",
    "http://example.com": "https://example.com/",
    "example.com:8443": "https://example.com/",
    "*.example.com": "https://example.com/ https://evilexample.com/ https://.example.com/",
}


@pytest.mark.parametrize(("entry", "url"), [(entry, url) for entry, urls in ALLOWED.items() for url in urls.split()])
def test_an_entry_allows_what_it_names(entry: str, url: str) -> None:
    assert is_taken(url, entry)


@pytest.mark.parametrize(
    ("entry", "url"), [(entry, url) for entry, urls in NOT_ALLOWED.items() for url in urls.split()]
)
def test_an_entry_allows_nothing_like_it(entry: str, url: str) -> None:
    assert not is_taken(url, entry)


NO_ENTRIES = """\
* *.com *.*.example.com a.*.example.com 127.0.0.1 [::1] ::1 2130706433 0x7f000001 example.com/ example.com/pictures
ftp://example.com user@example.com example.com:0 example.com:65536 example.com:http -example.com bücher.example
"""


@pytest.mark.parametrize("entry", [*NO_ENTRIES.split(), "", "exam ple.com"])
def test_an_entry_that_means_no_host_is_refused_when_it_is_read(entry: str) -> None:
    with pytest.raises(ValueError, match=r"example|port"):
        AllowedHost.parse(entry)


NO_NAMES = """\
127.0.0.1 8.8.8.8 127.1 2130706433 017700000001 0x7f000001 0x7f.1 0177.0.0.1 127.0.0.0x1 a.127 [::1]
[::ffff:127.0.0.1] [2606:4700::1111] [fe80::1%25eth0] bücher.example ①②⑦.0.0.1 example..com -a.example.com
"""


@pytest.mark.parametrize("host", [*NO_NAMES.split(), "a" * 64 + ".com", ""])
def test_a_url_names_its_host_in_ascii_and_never_by_an_address(host: str) -> None:
    with pytest.raises(FetchError) as caught:
        PictureUrl.parse(f"https://{host}/a.png")
    assert caught.value.code == "invalid_image_url"


@pytest.mark.parametrize(
    "url",
    [
        "https://user@example.com/",
        "https://user:word@example.com/",
        "https://@example.com/",
        "https://example.com:port/",
        "https://example.com:99999/",
        "https://example.com/a b",
        "https://example.com/\r\nHost: evil.org",
        "https://exam\tple.com/",
        "https://example.com/" + "a" * MAX_URL_LENGTH,
        "ftp://example.com/",
    ],
)
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


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450::1"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


NOT_PUBLIC = """\
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1
224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8
64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:db8::1
2002:7f00:1::1 2002:808:808::1 3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 127.1
2130706433 0x7f000001 localhost
"""


@pytest.mark.parametrize("address", [*NOT_PUBLIC.split(), ""])
def test_everything_else_is_not_public(address: str) -> None:
    assert not is_public(address)
