// Package byrank keeps a value for each peer of a rank in little memory: a rank exchanges frames with few of thousands
// of peers.
package byrank

// pageSize is how many values are allocated at once: neighbours are often used together.
const pageSize = 32

// Table holds a value for each rank: the zero value until it is set. It allocates memory for a page of ranks when one
// of them is first used, and a pointer for each page up to that one. The zero Table is empty. One goroutine at a time
// may use it.
type Table[T any] struct{ pages []*[pageSize]T }

// At returns the value of a rank, which may be changed. It panics if rank is negative.
func (t *Table[T]) At(rank int) *T {
	if page := rank / pageSize; page < len(t.pages) {
		if p := t.pages[page]; p != nil {
			return &p[rank%pageSize]
		}
	}
	return t.allocate(rank)
}

func (t *Table[T]) allocate(rank int) *T {
	page := rank / pageSize
	if page >= len(t.pages) {
		t.pages = append(t.pages, make([]*[pageSize]T, page+1-len(t.pages))...)
	}
	t.pages[page] = new([pageSize]T)
	return &t.pages[page][rank%pageSize]
}

// Get returns the value of a rank. It allocates nothing, and panics if rank is negative.
func (t *Table[T]) Get(rank int) T {
	if page := rank / pageSize; page < len(t.pages) {
		if p := t.pages[page]; p != nil {
			return p[rank%pageSize]
		}
	}
	var none T
	return none
}

// Set makes t a copy of other. It keeps the memory of t.
func (t *Table[T]) Set(other *Table[T]) {
	for page, p := range t.pages {
		if p != nil && (page >= len(other.pages) || other.pages[page] == nil) {
			*p = [pageSize]T{}
		}
	}
	for page, p := range other.pages {
		if p != nil {
			t.At(page * pageSize)
			*t.pages[page] = *p
		}
	}
}
