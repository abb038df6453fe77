"""The description of an XMP file: found in every form, and changed without a change to anything else."""

import xml.etree.ElementTree as ElementTree

import pytest

from llama_adapter.app.pictures.inputs.xmp import description_of, with_description

_HEAD = """<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="1 > 0"><rdf:RDF
 xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
 <rdf:Description rdf:about="uuid:1" xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:lr="http://ns.adobe.com/lr/"
  %s><dc:subject><rdf:Bag><rdf:li>a tag</rdf:li></rdf:Bag></dc:subject>"""
_TAIL = "</rdf:Description></rdf:RDF></x:xmpmeta>"
_ALT = "<dc:description><rdf:Alt>%s</rdf:Alt></dc:description>"


def xmp(inside: str = "", *, attribute: str = "") -> bytes:
    return (_HEAD % attribute + inside + _TAIL).encode()


DESCRIPTIONS = {
    "none": (xmp(), ""),
    "empty": (xmp("<dc:description/>"), ""),
    "plain": (xmp("<dc:description>a &lt;star&gt;</dc:description>"), "a <star>"),
    "default language": (xmp(_ALT % '<rdf:li xml:lang="x-default">ein Stern</rdf:li>'), "ein Stern"),
    "two languages": (
        xmp(_ALT % '<rdf:li xml:lang="de">de</rdf:li><rdf:li xml:lang="x-default">a star</rdf:li>'),
        "a star",
    ),
    "another language": (xmp(_ALT % '<rdf:li xml:lang="de">ein Stern</rdf:li>'), "ein Stern"),
    "empty item": (xmp(_ALT % '<rdf:li xml:lang="x-default"/>'), ""),
    "another one inside": (
        xmp(
            f"<lr:x><rdf:Bag><rdf:li>{_ALT % '<rdf:li>inner</rdf:li>'}</rdf:li></rdf:Bag></lr:x>"
            + _ALT % "<rdf:li>mine</rdf:li>"
        ),
        "mine",
    ),
    "CDATA": (b"\xef\xbb\xbf" + xmp(_ALT % "<rdf:li><![CDATA[a & b]]></rdf:li>"), "a & b"),
}


@pytest.mark.parametrize(("data", "text"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_description_is_found_and_changed_alone(data: bytes, text: str) -> None:
    assert description_of(data) == text
    changed = with_description("one & two", data)
    assert description_of(changed) == "one & two"
    assert description_of(with_description("three", changed)) == "three"
    ElementTree.fromstring(changed)
    for kept in (b'x:xmptk="1 > 0"', b"<rdf:li>a tag</rdf:li>", b'rdf:about="uuid:1"'):
        assert kept in changed


def test_a_new_file_has_the_description_only() -> None:
    assert description_of(with_description('a "<star>"\n', None)) == 'a "<star>"'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid XML"),
        (b'<?xml version="1.0" encoding="ISO-8859-1"?>' + xmp(), "its encoding is ISO-8859-1"),
        (b"<a>", "not valid XML"),
        (b"<a/>", "no rdf:RDF"),
        (xmp().decode().encode("utf-16"), "UTF-8"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "document type"),
        (b'<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"/>', "no rdf:RDF"),
    ],
)
def test_what_is_no_xmp_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        with_description("text", data)


def test_a_description_that_is_an_attribute_is_read_and_not_changed() -> None:
    data = xmp(attribute='dc:description="a star"')

    assert description_of(data) == "a star"
    with pytest.raises(ValueError, match="attribute"):
        with_description("text", data)
