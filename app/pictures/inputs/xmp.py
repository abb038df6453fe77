"""The description in an XMP file beside a picture: `dc:description`, as digiKam, darktable and Lightroom keep it.

Adobe XMP specification, parts 1 and 3: https://developer.adobe.com/xmp/docs/
"""

import re
from dataclasses import dataclass
from typing import Final
from xml.parsers import expat

_RDF: Final = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_DC: Final = "http://purl.org/dc/elements/1.1/"
_DESCRIPTION: Final = f"{_DC} description"
_PLACE: Final = [f"{_RDF} RDF", f"{_RDF} Description", _DESCRIPTION]  # elements around the text of the picture
MAX_BYTES: Final = 2**23  # of a file that is read
_LANGUAGE: Final = "http://www.w3.org/XML/1998/namespace lang"
_TAG: Final = re.compile(rb"""<(?:[^"'>]|"[^"]*"|'[^']*')*>""")
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NEW: Final = f"""\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="{_RDF}">
  <rdf:Description rdf:about="" xmlns:dc="{_DC}">
   <dc:description><rdf:Alt><rdf:li xml:lang="x-default">%s</rdf:li></rdf:Alt></dc:description>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


def description_of(data: bytes) -> str:
    """The description in an XMP file; "" if it has none. Raises ValueError with the reason if it cannot be read."""
    return _parsed(data).text.strip()


def with_description(text: str, data: bytes | None) -> bytes:
    """An XMP file with this description: a new one, or `data` in which everything else remains as it is, byte by byte.

    Characters that XML forbids become U+FFFD. Raises ValueError with the reason if `data` cannot be changed.
    """
    from xml.sax.saxutils import escape  # brings http and ssl with it

    text = escape(_NOT_IN_XML.sub("\ufffd", text))
    if data is None:
        return (_NEW % text).encode()
    found = _parsed(data)
    if found.is_attribute:
        raise ValueError("its dc:description is an attribute, which is not changed")
    new = f'<rdf:li xmlns:rdf="{_RDF}" xml:lang="x-default">{text}</rdf:li>'
    place = found.item
    if place is None:
        new, place = f'<dc:description xmlns:dc="{_DC}">{_in_rdf("Alt", new)}</dc:description>', found.description
    if place is None:
        new, place = _in_rdf("Description", new, about=found.about), (found.end, found.end)
    return data[: place[0]] + new.encode() + data[place[1] :]


def _in_rdf(name: str, inside: str, *, about: str | None = None) -> str:
    from xml.sax.saxutils import quoteattr

    attribute = "" if about is None else f" rdf:about={quoteattr(about)}"
    return f'<rdf:{name} xmlns:rdf="{_RDF}"{attribute}>{inside}</rdf:{name}>'


@dataclass(slots=True)
class _Xmp:
    """What a file has, with places as byte offsets of start and end."""

    text: str = ""
    description: tuple[int, int] | None = None  # the first dc:description
    item: tuple[int, int] | None = None  # its rdf:li of the default language, or the first one
    end: int = 0  # where </rdf:RDF> begins
    about: str = ""
    is_attribute: bool = False


def _parsed(data: bytes) -> _Xmp:
    found, path, starts, texts = _Xmp(), list[str](), list[int](), list[str]()
    is_default = False
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal is_default
        path.append(name)
        starts.append(parser.CurrentByteIndex)
        if path[-2:] == _PLACE[:2]:
            found.about = found.about or attributes.get(f"{_RDF} about", "")
            if _DESCRIPTION in attributes and not found.text:
                found.text, found.is_attribute = attributes[_DESCRIPTION], True
        is_default = attributes.get(_LANGUAGE, "").lower() == "x-default"
        texts.clear()

    def end(name: str) -> None:
        path.pop()
        begun, ended = starts.pop(), parser.CurrentByteIndex
        tag_end = _tag_end(data, begun)
        is_empty = data.endswith(b"/>", begun, tag_end)
        place = begun, tag_end if is_empty else _tag_end(data, ended)
        if name == f"{_RDF} li" and path[-4:-1] == _PLACE and found.description is None:
            if found.item is None or is_default:
                found.item, found.text = place, "".join(texts)
        elif [*path[-2:], name] == _PLACE and found.description is None:
            found.description = place
            found.text = found.text if found.item else "".join(texts)
        elif name == f"{_RDF} RDF" and not is_empty:
            found.end = ended

    def refuse(*_: object) -> None:
        raise ValueError("it has a document type, and XMP has none")

    def check(_: str, encoding: str | None, __: int) -> None:
        if (encoding or "utf-8").lower() != "utf-8":
            raise ValueError(f"its encoding is {encoding}, and not UTF-8")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = texts.append
    parser.StartDoctypeDeclHandler, parser.XmlDeclHandler = refuse, check
    try:
        data.decode()
        parser.Parse(data, True)
    except (expat.ExpatError, UnicodeDecodeError):
        raise ValueError("it is not valid XML in UTF-8") from None
    if not found.end:
        raise ValueError("it is not XMP: it has no rdf:RDF with content")
    return found


def _tag_end(data: bytes, start: int) -> int:
    found = _TAG.match(data, start)
    assert found is not None, "a parsed tag ends"
    return found.end()
