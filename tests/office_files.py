"""Small .pdf and .docx files, made on the spot."""

import io
from collections.abc import Sequence
from pathlib import Path

import docx
from docx.oxml import OxmlElement
from pypdf import PdfWriter

LINE = 14  # points


RAW = "raw:"
"""A line that begins so is written as it is, between the parentheses of a PDF string."""

_FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf_bytes(*pages: Sequence[str] | None, place: str = "72 760 Td", size: int = 11) -> bytes:
    """A PDF whose pages show these lines from a place; a line that begins with "# " has letters of 16, without the mark.

    A page None is an image, as a scan is.
    """
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", _FONT]
    kids = []
    for lines in pages:
        kids.append(f"{len(objects) + 1} 0 R")
        resources = "/Font << /F1 3 0 R >>"
        if lines is None:
            shown, resources = "q 612 0 0 792 0 0 cm /I Do Q", f"/XObject << /I {len(objects) + 3} 0 R >>"
        else:
            shown = f"BT /F1 {size} Tf {place} 14 TL " + " ".join(_shown(line, size) for line in lines) + " ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects) + 2} 0 R "
            f"/Resources << {resources} >> >>"
        )
        objects.append(_stream(shown))
        if lines is None:
            objects.append(
                _stream("x", "/Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8")
            )
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    return _written(objects)


def form_pdf(value: str, appearance: str, second: str = "") -> bytes:
    """A page with a text field; object 7 is its drawing. `second`: of a field 40 points below."""
    font = "/Resources << /Font << /F1 6 0 R >> >>"
    field = f"<< /Subtype /Widget /FT /Tx /V ({value}) /F 4 /DA (/F1 11 Tf 0 g) /T (name"
    return _written(
        [
            "<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [5 0 R] /DR << /Font << /F1 6 0 R >> >> >> >>",
            "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Annots [5 0 R 8 0 R] {font} >>",
            _stream("BT /F1 11 Tf 72 700 Td (Name:) Tj 0 -40 Td (Signed at the mill.) Tj ET"),
            f"{field}) /Rect [200 695 400 715] {appearance} >>",
            _FONT,
            _stream(f"BT /F1 11 Tf 2 6 Td ({value}) Tj ET", f"/Subtype /Form /BBox [0 0 200 20] {font}"),
            f"{field}2) /Rect [200 655 400 675] {second} >>" if second else "null",
        ]
    )


def unnamed_letters_pdf(line: str) -> bytes:
    """A page in a font that numbers its letters from the space on, without a table of their names."""
    codes = "".join(f"{ord(letter) - 29:04x}" for letter in line)
    return _written(
        [
            "<< /Type /Catalog /Pages 2 0 R >>",
            "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
            _stream(f"BT /F1 11 Tf 72 700 Td <{codes}> Tj ET"),
            "<< /Type /Font /Subtype /Type0 /BaseFont /Some /Encoding /Identity-H /DescendantFonts [6 0 R] >>",
            "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /Some /FontDescriptor 7 0 R "
            "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>",
            "<< /Type /FontDescriptor /FontName /Some /Flags 4 /FontBBox [0 0 1000 1000] /ItalicAngle 0 /StemV 80 >>",
        ]
    )


def _stream(content: str, entries: str = "") -> str:
    return f"<< {entries} /Length {len(content.encode('latin-1'))} >>\nstream\n{content}\nendstream"


def _written(objects: Sequence[str]) -> bytes:
    written, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(written)}\n%%EOF\n"
    return written + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def _shown(line: str, size: int) -> str:
    if line.startswith(RAW):
        return f"({line.removeprefix(RAW)}) Tj T*"
    line = line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    return f"/F1 16 Tf ({line[2:]}) Tj T* /F1 {size} Tf" if line.startswith("# ") else f"({line}) Tj T*"


def write_pdf(
    path: Path, *pages: Sequence[str], title: str = "", outline: Sequence[tuple[str, int]] = (), password: str = ""
) -> Path:
    """`outline`: titles with the number of their page, each one level below the one before."""
    writer = PdfWriter(clone_from=io.BytesIO(pdf_bytes(*pages)))
    if title:
        writer.add_metadata({"/Title": title})
    above = None
    for name, page in outline:
        above = writer.add_outline_item(title=name, page_number=page, parent=above)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


def write_docx(path: Path) -> Path:
    document = docx.Document()
    document.add_heading("The manual", 0)
    document.add_heading("Install", 1)
    document.add_paragraph("Run the installer. Then restart.")
    document.add_paragraph("one disk", style="List Bullet")
    document.add_paragraph("two hands", style="List Bullet")
    table = document.add_table(2, 2)
    for cell, text in zip(
        (cell for row in table.rows for cell in row.cells), ("Part", "Weight", "Disk", "5 kg"), strict=True
    ):
        cell.text = text
    table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
    document.add_heading("On Linux", 2)
    document.add_paragraph("Use the package.")
    document.save(str(path))
    return path
