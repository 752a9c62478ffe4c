//! PTX as data: instructions, a typed builder, a printer and a parser.
