package ranges

import "testing"

func TestText(t *testing.T) {
	for _, c := range []struct {
		list []int
		want string
	}{
		{nil, "ranks "},
		{[]int{3}, "rank 3"},
		{[]int{0, 1}, "ranks 0, 1"},
		{[]int{0, 1, 2, 5}, "ranks 0-2, 5"},
		{[]int{1, 3, 4, 7, 8, 9}, "ranks 1, 3, 4, 7-9"},
	} {
		if got := Text("rank", c.list); got != c.want {
			t.Errorf("%v: %q, want %q", c.list, got, c.want)
		}
	}
}
