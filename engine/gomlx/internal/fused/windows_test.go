package fused

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestWindows compares windows, and the sums over them, with loops over all pixels.
func TestWindows(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		size := rapid.IntRange(1, 4).Draw(rt, "size")
		before, after := rapid.IntRange(0, size-1).Draw(rt, "before"), rapid.IntRange(0, size-1).Draw(rt, "after")
		c := Convolution{
			Rows: rapid.IntRange(1, 2).Draw(rt, "rows"), Height: rapid.IntRange(size, 6).Draw(rt, "height"),
			Width: rapid.IntRange(size, 6).Draw(rt, "width"), Channels: rapid.IntRange(1, 9).Draw(rt, "channels"),
			Size: size, Before: before,
		}
		c.OutHeight, c.OutWidth = c.Height+before+after-size+1, c.Width+before+after-size+1
		random := func(n int) []float32 {
			list := make([]float32, n)
			for i := range list {
				list[i] = rand.Float32() - 0.5
			}
			return list
		}
		src := random(c.Rows * c.Height * c.Width * c.Channels)
		windows, columns := c.Rows*c.OutHeight*c.OutWidth, size*size*c.Channels
		got, want := random(windows*(columns+1)), make([]float32, windows*(columns+1))
		all, sums, from := random(windows*columns), make([]float32, len(src)), make([][]float32, size*size)
		each := func(f func(window, position, channel, pixel int)) { // pixel: -1 outside
			for position := range size * size {
				for window := range windows {
					r, y, x := window/(c.OutHeight*c.OutWidth), window/c.OutWidth%c.OutHeight, window%c.OutWidth
					y, x = y+position/size-before, x+position%size-before
					for channel := range c.Channels {
						pixel := ((r*c.Height+y)*c.Width+x)*c.Channels + channel
						if y < 0 || y >= c.Height || x < 0 || x >= c.Width {
							pixel = -1
						}
						f(window, position, channel, pixel)
					}
				}
			}
		}
		each(func(window, position, channel, pixel int) {
			at := position*c.Channels + channel
			from[position] = append(from[position], all[window*columns+at])
			if pixel >= 0 {
				want[window*(columns+1)+at] = src[pixel]
				sums[pixel] += all[window*columns+at]
			}
		})
		for w := range windows {
			want[w*(columns+1)+columns] = 1
		}
		if Windows(got, src, c); !slices.Equal(got, want) {
			rt.Errorf("%+v: windows %v, want %v", c, got, want)
		}
		for _, parts := range [][][]float32{{all}, from} {
			added := random(len(src))
			if AddWindows(added, parts, c); !slices.Equal(added, sums) {
				rt.Errorf("%+v: sums %v, want %v", c, added, sums)
			}
		}
	})
}
