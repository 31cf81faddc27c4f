// Lists of a product's registers, in its text and as its operands.
#define A4 "%0, %1, %2, %3"
#define A8 A4 ", %4, %5, %6, %7"
#define A12 A8 ", %8, %9, %10, %11"
#define A16 A12 ", %12, %13, %14, %15"
#define A20 A16 ", %16, %17, %18, %19"
#define A24 A20 ", %20, %21, %22, %23"
#define A28 A24 ", %24, %25, %26, %27"
#define A32 A28 ", %28, %29, %30, %31"
#define A36 A32 ", %32, %33, %34, %35"
#define A40 A36 ", %36, %37, %38, %39"
#define A44 A40 ", %40, %41, %42, %43"
#define A48 A44 ", %44, %45, %46, %47"
#define A52 A48 ", %48, %49, %50, %51"
#define A56 A52 ", %52, %53, %54, %55"
#define A60 A56 ", %56, %57, %58, %59"
#define A64 A60 ", %60, %61, %62, %63"
#define A72 A64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define A80 A72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define A88 A80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define A96 A88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define O4 F4(d, 0)
#define O8 O4, F4(d, 4)
#define O12 O8, F4(d, 8)
#define O16 O12, F4(d, 12)
#define O20 O16, F4(d, 16)
#define O24 O20, F4(d, 20)
#define O28 O24, F4(d, 24)
#define O32 O28, F4(d, 28)
#define O36 O32, F4(d, 32)
#define O40 O36, F4(d, 36)
#define O44 O40, F4(d, 40)
#define O48 O44, F4(d, 44)
#define O52 O48, F4(d, 48)
#define O56 O52, F4(d, 52)
#define O60 O56, F4(d, 56)
#define O64 O60, F4(d, 60)
#define O72 O64, F4(d, 64), F4(d, 68)
#define O80 O72, F4(d, 72), F4(d, 76)
#define O88 O80, F4(d, 80), F4(d, 84)
#define O96 O88, F4(d, 88), F4(d, 92)
