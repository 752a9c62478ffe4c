//! The source line of a machine instruction, by the line table of its cubin.
//!
//! A cubin is an ELF file in which each function has a section that begins at address 0, and `.debug_line` a sequence of rows (DWARF 4,
//! section 6.2) of each: relocations say whose. In the rows of an inlined function an extended opcode of NVIDIA's own says which row of
//! the sequence calls it.

use std::collections::BTreeMap;

use gimli::{
    AttributeValue, DebugLine, DebugLineOffset, DwLne, EndianSlice, IncompleteLineProgram, LineInstruction,
    LineProgramHeader, LineRow, LittleEndian, Reader,
};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SymbolIndex};

use crate::evidence::Place;

/// The extended opcode with two numbers: the row that calls the function that the next rows are of, counted from 1 (0: none does), and
/// where `.debug_str` has the function's name.
const INLINED_CALL: DwLne = DwLne(0x90);

/// A place in a cubin: the section's index, and the offset in it.
type Offset = u64;

fn offset(section: usize, address: u64) -> Option<Offset> {
    Some((u64::try_from(section).ok()? << 32) | u64::from(u32::try_from(address).ok()?))
}

/// The functions and lines of a cubin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LineTable {
    /// By the index of their symbol: where they begin, and their bytes.
    functions: BTreeMap<usize, (Offset, u64)>,
    /// Names of source files.
    files: Vec<String>,
    /// Where rows begin, and their line: that of the kernel, where a function was inlined. `None` where a sequence ends.
    rows: BTreeMap<Offset, Option<Line>>,
}

/// The place of a name in [`LineTable::files`], and a line counted from 1.
type Line = (usize, u32);

/// A longer name is none: what a damaged table says would else be repeated.
const MOST_NAME: usize = 4096;

type Slice<'a> = EndianSlice<'a, LittleEndian>;

impl LineTable {
    /// Reads a cubin: of a damaged one, what there is before the damage.
    pub(super) fn of(cubin: &[u8]) -> Self {
        let mut table = Self::default();
        let Ok(file) = ElfFile64::<object::Endianness>::parse(cubin) else { return table };
        for symbol in file.symbols().filter(|symbol| symbol.size() > 0) {
            let start = symbol.section_index().and_then(|section| offset(section.0, symbol.address()));
            table.functions.extend(start.map(|start| (symbol.index().0, (start, symbol.size()))));
        }
        let Some(section) = file.section_by_name(".debug_line") else { return table };
        let mut lines = section.data().unwrap_or_default().to_vec();
        for (at, relocation) in section.relocations() {
            let RelocationTarget::Symbol(symbol) = relocation.target() else { continue };
            let target = relocated(&file, symbol, relocation.addend());
            let place = usize::try_from(at).ok().and_then(|at| lines.get_mut(at..at.checked_add(8)?));
            if let (Some(target), Some(place)) = (target, place) {
                place.copy_from_slice(&target.to_le_bytes());
            }
        }
        table.read(&lines);
        table
    }

    /// The programs of a section, one after the other.
    fn read(&mut self, bytes: &[u8]) {
        let section = DebugLine::new(bytes, LittleEndian);
        let mut at = 0;
        while at < bytes.len() {
            let Ok(program) = section.program(DebugLineOffset(at), 8, None, None) else { return };
            let length = usize::from(program.header().format().initial_length_size())
                .saturating_add(program.header().unit_length());
            if self.run(program).is_err() {
                return;
            }
            at = at.saturating_add(length);
        }
    }

    fn run<'a>(&mut self, mut program: IncompleteLineProgram<Slice<'a>>) -> gimli::Result<()> {
        let mut instructions = program.header().instructions();
        let mut row = LineRow::new(program.header());
        let mut files = BTreeMap::new();
        // Of the sequence: the lines of its rows, without callees; and the row that calls the function that is read.
        let mut callers: Vec<Option<Line>> = Vec::new();
        let mut caller = 0;
        while let Some(instruction) = instructions.next_instruction(program.header())? {
            if let LineInstruction::UnknownExtended(INLINED_CALL, mut operands) = instruction {
                caller = usize::try_from(operands.read_uleb128()?).unwrap_or(0);
                continue;
            }
            if !row.execute(instruction, &mut program)? {
                continue;
            }
            if row.end_sequence() {
                self.rows.entry(row.address()).or_insert(None);
                callers.clear();
                caller = 0;
            } else {
                let called = caller.checked_sub(1).and_then(|caller| callers.get(caller).copied().flatten());
                let line = called.or_else(|| {
                    let file = files.entry(row.file_index()).or_insert_with(|| {
                        self.files.push(file(&row, program.header())?);
                        Some(self.files.len() - 1)
                    });
                    Some(((*file)?, u32::try_from(row.line()?.get()).ok()?))
                });
                callers.push(line);
                self.rows.insert(row.address(), line);
            }
            row.reset(program.header());
        }
        Ok(())
    }

    /// The line of the instruction so many bytes after the beginning of the function with this symbol; `None` where it is not known.
    pub(super) fn place(&self, symbol: usize, bytes: u64) -> Option<Place> {
        let (start, size) = self.functions.get(&symbol)?;
        let at = start.checked_add(bytes).filter(|_| bytes < *size)?;
        let (from, line) = self.rows.range(..=at).next_back()?;
        let (file, line) = line.filter(|_| from >> 32 == at >> 32)?;
        Some(Place { file: self.files.get(file)?.clone(), line })
    }
}

/// What a relocation puts in its place.
fn relocated(file: &ElfFile64<'_>, symbol: SymbolIndex, addend: i64) -> Option<Offset> {
    let symbol = file.symbol_by_index(symbol).ok()?;
    offset(symbol.section_index()?.0, symbol.address().checked_add_signed(addend)?)
}

/// The name of the file that a row is of.
fn file(row: &LineRow, header: &LineProgramHeader<Slice<'_>>) -> Option<String> {
    let file = row.file(header)?;
    let text = |value| match value {
        AttributeValue::String(text) => Some(Slice::to_string_lossy(&text).into_owned()),
        _ => None,
    };
    let name = text(file.path_name())?;
    let name = match file.directory(header).and_then(text) {
        Some(folder) if !folder.is_empty() && !name.starts_with('/') => format!("{folder}/{name}"),
        _ => name,
    };
    (name.len() <= MOST_NAME).then_some(name)
}
