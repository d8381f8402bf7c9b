package fused

// Convolution describes the windows of a convolution of images of shape (rows, height, width, channels), which are size
// by size pixels, and which begin before pixels outside of the image. There are outHeight by outWidth in each image.
type Convolution struct {
	Rows, Height, Width, Channels int
	Size, Before                  int
	OutHeight, OutWidth           int
}

// Windows writes the pixels of each window, and a 1, one window after the other. Pixels outside of the image are 0.
func Windows[T Float](dst, src []T, c Convolution) {
	line := c.Size * c.Channels
	for r := range c.Rows {
		for y := range c.OutHeight {
			for x := range c.OutWidth {
				first := max(0, c.Before-x) // pixels of a line of the window that are left of the image
				last := min(c.Size, c.Width+c.Before-x)
				for i := range c.Size {
					to := dst[:line]
					dst = dst[line:]
					at := y + i - c.Before
					if at < 0 || at >= c.Height || last <= first {
						clear(to)
						continue
					}
					from := ((r*c.Height+at)*c.Width + x + first - c.Before) * c.Channels
					clear(to[:first*c.Channels])
					copy(to[first*c.Channels:last*c.Channels], src[from:])
					clear(to[last*c.Channels:])
				}
				dst[0] = 1
				dst = dst[1:]
			}
		}
	}
}

// AddWindows is the gradient of Windows: it adds up the numbers of all windows that belong to a pixel, in the order of
// their positions in the window. parts has the numbers of each position, of shape (windows, channels); or one element
// with those of all positions, of shape (windows, positions·channels).
func AddWindows[T Float](dst []T, parts [][]T, c Convolution) {
	clear(dst)
	for i := range c.Size {
		for j := range c.Size {
			part, step := parts[0], c.Size*c.Size*c.Channels
			if len(parts) > 1 {
				part, step = parts[i*c.Size+j], c.Channels
			} else {
				part = part[(i*c.Size+j)*c.Channels:]
			}
			first, last := max(0, c.Before-j), min(c.OutWidth, c.Width+c.Before-j)
			for r := range c.Rows {
				for y := range c.OutHeight {
					at := y + i - c.Before
					if at < 0 || at >= c.Height || last <= first {
						continue
					}
					to := dst[((r*c.Height+at)*c.Width+first+j-c.Before)*c.Channels:]
					from := part[((r*c.OutHeight+y)*c.OutWidth+first)*step:]
					if step == c.Channels {
						n := (last - first) * c.Channels
						add(to[:n], from[:n])
						continue
					}
					for k := range last - first {
						add(to[k*c.Channels:][:c.Channels], from[k*step:][:c.Channels])
					}
				}
			}
		}
	}
}
