// Package product multiplies matrices of float32 and float64, with the same bits on every machine.
//
// An element of a product is a sum over pieces of 256 columns of the left matrix, in their order. Within a piece, it is
// a chain of fused multiply-adds, in order of the columns, that starts from 0. Tasks divide the rows and the columns of
// the result, never the columns of the left matrix. So neither the number of goroutines nor the vectors of the
// processor change a bit, except in which of several NaNs results.
//
// The left matrix is read in place, with any strides, or blocks of it are copied ([Product.Copies]). Panels of the
// right one are packed, unless they are used too few times: by the kernel of the first rows where the elements of a row
// of the right matrix lie side by side. The kernels are assembly
// for AVX2, AVX-512 and NEON, written by the programs of backend/internal/_gen, a separate module. The plain form in Go
// is the reference.
package product

import "unsafe"

// Float lists the types of elements.
type Float interface{ float32 | float64 }

// Strides are the numbers of elements from a row of a matrix to the next and from a column to the next.
type Strides struct{ Row, Column int }

// Product describes c = a·b: the sizes and where the elements lie. In a row of c, elements lie side by side.
type Product struct {
	Rows, Columns, Depth int // c has Rows × Columns elements, a Rows × Depth
	A, B                 Strides
	C                    int // elements from a row of c to the next
}

const (
	piece      = 256 // columns of a in a chain of fused multiply-adds
	mostRows   = 14  // of a kernel
	mostBytes  = 128 // of a row of a kernel's result
	blockBytes = 256 << 10
	line       = 64 // bytes that copyRows copies

	longColumns = 64 // of the kernel of one row
)

// ScratchBytes is the size of the memory that [Run] needs besides the matrices: a panel, a tile, arguments and a block.
const ScratchBytes = blockAt + blockBytes + line

// blockAt is where the block of the left matrix is.
const blockAt = (piece+mostRows)*mostBytes + 2*int(unsafe.Sizeof(arguments{}))

// arguments are those of a kernel: the fields that _gen lists.
type arguments struct {
	a, b, c                    unsafe.Pointer
	row, column, right, result int // bytes
	steps, segments            int
	segmentStep, rightStep     int // bytes from the end of a segment to the next, of a and b
	add                        int
	packed                     unsafe.Pointer // where pack copies rows of b
}

// kernels are the loops for one type of elements and one instruction set.
type kernels struct {
	rows int // of the largest kernel
	wide int // columns of a kernel of two vectors; one of one vector has half of them

	multiply  func(rows, vectors int, x *arguments)
	long      func(x *byte)                                               // of one row and longColumns; or nil
	pack      func(rows int, x *arguments)                                // and copies b, of two vectors; or nil
	copyRows  func(dst, src unsafe.Pointer, rows, dstStep, srcStep int)   // of 64 bytes; nil if there is none
	transpose func(dst, src unsafe.Pointer, blocks, dstStep, srcStep int) // 8 × 8; nil if there is none
}

// kernelsOf returns the kernels of a set of instructions.
func kernelsOf[T Float](l Level) *kernels {
	if unsafe.Sizeof(*new(T)) == 4 {
		return &sets[l].f32
	}
	return &sets[l].f64
}

// set has the kernels of an instruction set.
type set struct{ f32, f64 kernels }

// Level is an instruction set for which there are kernels.
type Level uint8

// The levels. A build or a processor need not have all.
const (
	Plain Level = iota
	AVX2
	AVX512
	NEON
)

func (l Level) String() string { return [...]string{"plain Go", "AVX2", "AVX-512", "NEON"}[l] }

// Run computes rows r0 to r1 and columns j0 to j1 of the product at the best level.
func Run[T Float](p *Product, c, a, b []T, r0, r1, j0, j1 int, scratch unsafe.Pointer) {
	run(p, best, c, a, b, r0, r1, j0, j1, scratch)
}

// Copies reports whether [Run] copies blocks of the left matrix, whose elements have so many bytes, if it computes at
// least so many columns, because the cache could not hold what a kernel reads: columns of the matrix, or rows that lie
// a multiple of 2 KiB apart, share few sets of it. Each call copies all its rows.
func (p *Product) Copies(bytes int) (columns int, ok bool) {
	if p.A.Row == 1 {
		return 64, p.A.Column > 1
	}
	return 256, p.A.Column == 1 && p.A.Row*bytes%2048 == 0
}

// reach panics if a matrix of so many rows and columns does not lie in a slice.
func reach(name string, n, rows, columns int, s Strides) {
	if rows > 0 && columns > 0 && ((rows-1)*s.Row+(columns-1)*s.Column >= n || s.Row < 0 || s.Column < 0) {
		panic("product: matrix " + name + " reaches beyond its elements")
	}
}

func run[T Float](p *Product, l Level, c, a, b []T, r0, r1, j0, j1 int, scratch unsafe.Pointer) {
	reach("a", len(a), p.Rows, p.Depth, p.A)
	reach("b", len(b), p.Depth, p.Columns, p.B)
	reach("c", len(c), p.Rows, p.Columns, Strides{p.C, 1})
	if r0 < 0 || r1 > p.Rows || j0 < 0 || j1 > p.Columns {
		panic("product: rows or columns outside of the matrix")
	}
	if p.Depth == 0 {
		for i := r0; i < r1; i++ {
			clear(c[i*p.C+j0 : i*p.C+j1])
		}
		return
	}
	size := int(unsafe.Sizeof(*new(T)))
	k := kernelsOf[T](l)
	tile := unsafe.Slice((*T)(unsafe.Add(scratch, piece*mostBytes)), mostRows*mostBytes/size)
	both := (*[2]arguments)(unsafe.Add(scratch, (piece+mostRows)*mostBytes))
	x, y := &both[0], &both[1]
	least, copies := p.Copies(size)
	copies = copies && j1-j0 >= least && r1-r0 > k.rows && k.copyRows != nil && k.rows*size <= line
	// So many rows of a stay in the second-level cache while the panels of b pass.
	most, strip := 2*blockBytes, min(p.Depth, piece)*k.rows*size
	if copies {
		most, strip = blockBytes, strip+line
	}
	block := max(1, most/strip) * k.rows
	for top := r0; top < r1; top += block {
		bottom := min(top+block, r1)
		strips := (bottom - top + k.rows - 1) / k.rows
		height := (bottom - top + strips - 1) / strips
		for from := 0; from < p.Depth; from += piece {
			depth := min(piece, p.Depth-from)
			if copies {
				copyBlock(p, k, unsafe.Add(scratch, blockAt), a, top, bottom, height, from, depth)
			}
			columns := 0
			for j := j0; j < j1; j += columns {
				vectors := 2
				if columns = min(k.wide, j1-j); columns <= k.wide/2 {
					vectors = 1
				}
				width := k.wide / 2 * vectors
				long := k.long != nil && bottom-top == 1 && p.B.Column == 1 && j1-j >= longColumns
				if long {
					columns, width = longColumns, longColumns
				}
				*x = arguments{
					row: p.A.Row * size, column: p.A.Column * size, result: p.C * size,
					steps: depth, segments: 1, add: min(from, 1),
				}
				switch {
				case copies && p.A.Column == 1:
					x.row = depth * size
				case copies:
					x.row, x.column = size, height*size
				}
				packs := k.pack != nil && columns == k.wide && p.B.Column == 1
				if columns == width && p.B.Column == 1 && (packs || bottom-top <= 2*k.rows) {
					x.b, x.right = unsafe.Pointer(&b[from*p.B.Row+j]), p.B.Row*size
				} else {
					pack[T](k, scratch, unsafe.Pointer(&b[from*p.B.Row+j*p.B.Column]), p.B, depth, columns, width)
					x.b, x.right = scratch, width*size
				}
				for i := top; i < bottom; i += height {
					rows := min(height, bottom-i)
					if !copies {
						x.a = unsafe.Pointer(&a[i*p.A.Row+from*p.A.Column])
					} else {
						x.a = unsafe.Add(scratch, blockAt+(i-top)/height*(height*depth*size+line))
					}
					if columns == width {
						x.c = unsafe.Pointer(&c[i*p.C+j])
						if packs && i == top && bottom-top > 2*k.rows { // while the first strip reads the panel
							x.packed = scratch
							k.pack(rows, x)
							x.b, x.right = scratch, width*size
							continue
						}
						if long {
							k.long((*byte)(unsafe.Pointer(x)))
							continue
						}
						k.multiply(rows, vectors, x)
						continue
					}
					*y = *x
					y.c, y.result, y.add = unsafe.Pointer(&tile[0]), width*size, 0
					k.multiply(rows, vectors, y)
					for r := range rows {
						addRow(c[(i+r)*p.C+j:][:columns], tile[r*width:][:columns], x.add)
					}
				}
			}
		}
	}
}

// copyBlock copies so many columns of some rows of a: strips of so many rows, each row by row or column by column, as a
// lies. A line follows each strip.
func copyBlock[T Float](p *Product, k *kernels, to unsafe.Pointer, a []T, top, bottom, height, from, depth int) {
	size := int(unsafe.Sizeof(*new(T)))
	step := height*depth*size + line
	if p.A.Column == 1 {
		for i := top; i < bottom; i++ {
			row := unsafe.Add(to, (i-top)/height*step+(i-top)%height*depth*size)
			copy(unsafe.Slice((*T)(row), depth), a[i*p.A.Row+from:])
		}
		return
	}
	for i := top; i < bottom; i += height {
		// copyRows reads whole lines, which the last columns of a may not have, and the next column replaces the excess.
		first, at := i+from*p.A.Column, unsafe.Add(to, (i-top)/height*step)
		whole := max(0, min(depth, (len(a)-line/size-first+p.A.Column)/p.A.Column))
		if whole > 0 {
			k.copyRows(at, unsafe.Pointer(&a[first]), whole, height*size, p.A.Column*size)
		}
		for c := whole; c < depth; c++ {
			copy(unsafe.Slice((*T)(unsafe.Add(at, c*height*size)), height), a[first+c*p.A.Column:])
		}
	}
}

// addRow copies a row of a tile, or adds it.
func addRow[T Float](to, from []T, add int) {
	if add == 0 {
		copy(to, from)
		return
	}
	for i, v := range from {
		to[i] += v
	}
}

// pack copies so many rows and columns of b, and fills rows of the given width with zeros.
func pack[T Float](k *kernels, to, b unsafe.Pointer, s Strides, rows, columns, width int) {
	size := int(unsafe.Sizeof(*new(T)))
	packed := unsafe.Slice((*T)(to), rows*width)
	at := func(row, column int) unsafe.Pointer { return unsafe.Add(b, (row*s.Row+column*s.Column)*size) }
	if columns == width && s.Column == 1 && k.copyRows != nil && width*size >= 64 {
		for j := 0; j < width; j += 64 / size {
			k.copyRows(unsafe.Add(to, j*size), at(0, j), rows, width*size, s.Row*size)
		}
		return
	}
	done := 0
	if s.Row == 1 && s.Column != 1 && k.transpose != nil && size == 4 && rows >= 8 && columns >= 8 {
		done = columns &^ 7
		blocks := rows / 8
		for j := 0; j < done; j += 8 {
			k.transpose(unsafe.Add(to, j*size), at(0, j), blocks, width*size, s.Column*size)
		}
		for r := blocks * 8; r < rows; r++ {
			for j := range done {
				packed[r*width+j] = *(*T)(at(r, j))
			}
		}
	}
	for r := range rows {
		row := packed[r*width : (r+1)*width]
		for j := done; j < columns; j++ {
			row[j] = *(*T)(at(r, j))
		}
		clear(row[columns:])
	}
}
